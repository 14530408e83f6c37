"""What can go wrong in the learner."""

from __future__ import annotations

from forebay.errors import ForebayError


class LearnerError(ForebayError, RuntimeError):
    """The learner cannot go on; the message says why and what to do."""


class BadExperience(LearnerError):
    """A batch holds something that must not be trained on."""


class NonFiniteTraining(LearnerError):
    """Losses or gradients stayed non-finite; no such update ever reached the weights."""


class KlExceeded(LearnerError):
    """The learner has drifted too far from the policy that generated the batch."""
