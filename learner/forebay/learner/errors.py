"""What can go wrong in the learner."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.errors import ForebayError


class LearnerError(ForebayError, RuntimeError):
    """The learner cannot go on; the message says why and what to do."""


class BadExperience(LearnerError):
    """Groups of a batch cannot be trained on."""

    def __init__(self, message: str, group_ids: Sequence[int]) -> None:
        super().__init__(message)
        self.group_ids = tuple(group_ids)


class NonFiniteTraining(LearnerError):
    """Losses or gradients stayed non-finite; no such update ever reached the weights."""


class KlExceeded(LearnerError):
    """The learner has drifted too far from the policy that generated the batch."""
