"""From a lease to trajectories, and what is worth telling about them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.buffer.client import Lease
from forebay.learner.errors import BadExperience
from forebay.wire.experience import decode_frame
from forebay.wire.trajectory import Trajectory


def open_batch(lease: Lease) -> list[Trajectory]:
    """The leased trajectories in training order: groups as leased, members by number.

    Frames may hold other groups too; of a group that was produced twice the first copy counts, as it did for the
    buffer. Raises BadExperience when a leased group is in no frame.
    """
    groups: dict[int, list[Trajectory]] = {}
    for frame in lease.frames:
        arrived: dict[int, list[Trajectory]] = {}
        for trajectory in decode_frame(frame):
            arrived.setdefault(trajectory.group_id, []).append(trajectory)
        for group_id, members in arrived.items():
            groups.setdefault(group_id, members)
    missing = [group_id for group_id in lease.group_ids if group_id not in groups]
    if missing:
        raise BadExperience(f"step {lease.step}: the leased groups {missing} came in no frame")
    return [
        trajectory
        for group_id in lease.group_ids
        for trajectory in sorted(groups[group_id], key=lambda member: member.member)
    ]


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
