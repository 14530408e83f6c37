"""Which finished groups are not worth training: they are refunded, so that others come instead."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.config.learner_section import LearnerSection
from forebay.wire.trajectory import Trajectory

#: Rewards closer together than this tell nothing apart; the learner's advantage is 0 there too.
ZERO_SPREAD = 1e-6


def why_filtered(group: Sequence[Trajectory], learner: LearnerSection) -> str:
    """The reason under which the ledger counts a group that is filtered out; "" for one to be trained.

    `zero_variance`: all rewards are equal, so no member has an advantage (dynamic sampling, DAPO, arXiv 2503.14476).
    `overlong`: no member came to its end within `max_new_tokens`.
    """
    rewards = [member.reward for member in group]
    if learner.drop_overlong and all(member.finish_reason == "length" for member in group):
        return "overlong"
    if learner.drop_zero_variance and len(group) > 1 and max(rewards) - min(rewards) < ZERO_SPREAD:
        return "zero_variance"
    return ""
