"""From a lease to trajectories, and what is worth telling about them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from forebay.buffer.client import Lease
from forebay.learner.errors import BadExperience
from forebay.wire.experience import FrameError, decode_frame
from forebay.wire.trajectory import Trajectory


def open_batch(lease: Lease) -> list[Trajectory]:
    """The leased trajectories in training order: groups as leased, members by number.

    Frames may hold other groups too; of a group that was produced twice the first copy counts, as it did for the
    buffer. Raises BadExperience when a leased group is in no frame, in one that cannot be opened, or has a reward that
    is not finite, which would spoil its whole group.
    """
    groups: dict[int, list[Trajectory]] = {}
    damage: list[str] = []
    for frame in lease.frames:
        try:
            for group_id, members in by_group(decode_frame(frame)).items():
                groups.setdefault(group_id, members)
        except FrameError as error:
            damage.append(str(error))
    missing = [group_id for group_id in lease.group_ids if group_id not in groups]
    if missing:
        causes = "; ".join(damage) or "they came in no frame"
        raise BadExperience(f"step {lease.step}: the leased groups {missing} cannot be read: {causes}", missing)
    spoiled = [group_id for group_id in lease.group_ids if not _is_finite(groups[group_id])]
    if spoiled:
        raise BadExperience(f"step {lease.step}: the leased groups {spoiled} have rewards that are not finite", spoiled)
    return [
        trajectory
        for group_id in lease.group_ids
        for trajectory in sorted(groups[group_id], key=lambda member: member.member)
    ]


def by_group(trajectories: Sequence[Trajectory]) -> dict[int, list[Trajectory]]:
    """Groups by id, in the order of their first members."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return groups


def _is_finite(group: Sequence[Trajectory]) -> bool:
    return all(math.isfinite(member.reward) for member in group)


def batch_metrics(trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
    """Rewards, sizes and staleness of a batch that is trained in `step`."""
    rewards = np.asarray([trajectory.reward for trajectory in trajectories], np.float64)
    staleness = [max(0, step - 1 - trajectory.oldest.step) for trajectory in trajectories if trajectory.spans]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "staleness_mean": float(np.mean(staleness)) if staleness else 0.0,
        "staleness_max": max(staleness, default=0),
        "generated_tokens": sum(int(np.count_nonzero(trajectory.loss_mask)) for trajectory in trajectories),
        "prompt_tokens": sum(len(trajectory.prompt_tokens) for trajectory in trajectories),
    }
