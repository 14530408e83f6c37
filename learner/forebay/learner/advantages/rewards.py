"""Rewards before they become advantages: over-long replies pay, the batch is normalised, outliers are cut.

In this order. Over-long shaping is DAPO's soft punishment (arXiv 2503.14476): with L = max_new_tokens and C =
`overlong_tokens`, a reply of n tokens costs 0 up to L - C, then (n - (L - C)) / C, and 1 from L on, times
`overlong_penalty`. Normalisation is over one batch and not a running one, so that a step depends on its batch and the
checkpoint alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.config.models import RunFile
from forebay.learner.advantages.episode import Floats
from forebay.learner.advantages.statistics import normalized
from forebay.learner.ranks import ALONE, Ranks
from forebay.wire.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardShaping:
    """What `[learner]` says about rewards."""

    max_new_tokens: int
    overlong_tokens: int = 0
    overlong_penalty: float = 1.0
    normalize: bool = False
    clip: tuple[float, float] | None = None
    ranks: Ranks = ALONE

    @classmethod
    def of(cls, run: RunFile, ranks: Ranks = ALONE) -> RewardShaping:
        """As the run file says."""
        learner = run.learner
        return cls(
            max_new_tokens=run.sampler.max_new_tokens,
            overlong_tokens=learner.overlong_tokens,
            overlong_penalty=learner.overlong_penalty,
            normalize=learner.reward_normalize,
            clip=learner.reward_clip,
            ranks=ranks,
        )

    def __call__(self, trajectories: Sequence[Trajectory]) -> Floats:
        """The shaped reward of each trajectory of a batch. A collective call."""
        rewards = np.asarray([t.reward - self._overlong(len(t.tokens)) for t in trajectories], np.float64)
        if self.normalize:
            rewards = normalized(rewards, self.ranks)
        return rewards if self.clip is None else np.clip(rewards, *self.clip)

    def _overlong(self, length: int) -> float:
        if not self.overlong_tokens:
            return 0.0
        beyond = length - (self.max_new_tokens - self.overlong_tokens)
        return self.overlong_penalty * min(1.0, max(0.0, beyond / self.overlong_tokens))
