"""What an estimator sees of a trajectory, and what it is.

Shape suffixes: t trained tokens of one trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The outcome of a trajectory of `tokens` trained tokens."""

    reward: float  #: given at the end, after shaping
    tokens: int
    penalty_t: Floats | None = None  #: cost of each token (KL to the reference, already weighted)
    value_t: Floats | None = None  #: the critic's value of the state before each token

    @property
    def outcome(self) -> float:
        """Reward minus all penalties."""
        return self.reward if self.penalty_t is None else self.reward - float(self.penalty_t.sum())

    def token_rewards(self) -> Floats:
        """Reward of each token [t]: its penalty, negative, and at the last one the reward too."""
        reward_t = np.zeros(self.tokens) if self.penalty_t is None else -self.penalty_t
        if self.tokens:
            reward_t[-1] += self.reward
        return reward_t


Group = Sequence[Episode]

#: From the groups of a batch to an advantage [t] a trajectory, in the same order.
Estimator = Callable[[Sequence[Group]], list[list[Floats]]]


def constant(group: Group, advantages: Floats) -> list[Floats]:
    """One number a trajectory, the same at each of its tokens."""
    return [np.full(episode.tokens, advantage) for episode, advantage in zip(group, advantages, strict=True)]
