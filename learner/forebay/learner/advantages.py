"""Advantages from the rewards of a group (GRPO, arXiv 2402.03300; without the division: Dr. GRPO, arXiv 2503.20783)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.learner.packing import Sample
from forebay.wire.trajectory import Trajectory

#: A group whose rewards differ by less than this has told nothing apart.
ZERO_SPREAD = 1e-6


def group_advantages(rewards: Sequence[float], *, normalize: bool) -> list[float]:
    """(reward - mean) / standard deviation of the group, population deviation (divided by G, not G - 1), no epsilon.

    `normalize=False` leaves the division out. By rule, a group of one and a group of equal rewards get 0. Rewards are
    finite: `open_batch` lets no others in.
    """
    values = np.asarray(rewards, np.float64)
    centred = values - values.mean()
    spread = centred.std()
    if len(values) < 2 or spread < ZERO_SPREAD:
        return [0.0] * len(values)
    return list((centred / spread if normalize else centred).tolist())


def with_advantages(trajectories: Sequence[Trajectory], *, normalize: bool) -> list[list[Sample]]:
    """The batch as groups, in the order of their first members, each member with its advantage."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return [_with_advantages(group, normalize) for group in groups.values()]


def _with_advantages(group: list[Trajectory], normalize: bool) -> list[Sample]:
    advantages = group_advantages([trajectory.reward for trajectory in group], normalize=normalize)
    return [Sample(trajectory=t, advantage=a) for t, a in zip(group, advantages, strict=True)]
