"""REINFORCE++ (arXiv 2501.03262): no critic and no group; the batch itself is the scale.

A_it = sum_{k >= t} gamma^(k-t) r_ik            r_ik: penalties, and the reward at the last token
then (A - mean(A)) / std(A) over all trained tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.learner.advantages.episode import Episode, Floats, Group
from forebay.learner.advantages.statistics import normalized_tokens
from forebay.learner.ranks import ALONE, Ranks


def reinforce_pp(groups: Sequence[Group], gamma: float, ranks: Ranks = ALONE) -> list[list[Floats]]:
    """An `Estimator`, once `gamma` is given."""
    return normalized_tokens([[_returns(episode, gamma) for episode in group] for group in groups], ranks)


def _returns(episode: Episode, gamma: float) -> Floats:
    returns_t, later = episode.token_rewards(), 0.0
    for index in reversed(range(len(returns_t))):
        later = returns_t[index] = returns_t[index] + gamma * later
    return np.asarray(returns_t)
