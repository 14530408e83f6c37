"""Generalised advantage estimation (arXiv 1506.02438) over the tokens of a trajectory.

    delta_t = r_t + gamma V_{t+1} - V_t             V beyond the last token is 0: the episode is over
    A_t     = delta_t + gamma lambda A_{t+1}
    R_t     = A_t + V_t                             what the critic learns, before A is normalised

then A is normalised over all trained tokens of the batch. A reply that was cut at its longest is over too: it was
scored as it stands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.learner.advantages.episode import Episode, Floats, Group
from forebay.learner.advantages.statistics import normalized_tokens
from forebay.learner.ranks import ALONE, Ranks


def gae(groups: Sequence[Group], gamma: float, lam: float, ranks: Ranks = ALONE) -> list[list[Floats]]:
    """An `Estimator`, once `gamma` and `lam` are given; every episode has values."""
    return normalized_tokens([[episode_gae(episode, gamma, lam) for episode in group] for group in groups], ranks)


def gae_returns(episode: Episode, gamma: float, lam: float) -> Floats:
    """R [t]."""
    assert episode.value_t is not None
    return episode_gae(episode, gamma, lam) + episode.value_t


def episode_gae(episode: Episode, gamma: float, lam: float) -> Floats:
    """A [t] of one episode, not normalised."""
    assert episode.value_t is not None, "the estimator gae comes with a critic"
    next_t = np.append(episode.value_t[1:], 0.0)[: episode.tokens]
    advantage_t, later = episode.token_rewards() + gamma * next_t - episode.value_t, 0.0
    for index in reversed(range(episode.tokens)):
        later = advantage_t[index] = advantage_t[index] + gamma * lam * later
    return np.asarray(advantage_t)
