"""From a lease to trajectories, and what is worth telling about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forebay.buffer.client import Lease
from forebay.learner.errors import BadExperience
from forebay.learner.ranks import ALONE, Ranks
from forebay.wire.experience import FrameError, decode_frame
from forebay.wire.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The experience of one step: of several ranks, each has its own groups."""

    trajectories: Sequence[Trajectory]  #: in training order: groups as leased, members by number
    fleets: Mapping[int, str]  #: who produced each group
    group_ids: Sequence[int]  #: of the whole batch, in training order


def open_batch(lease: Lease) -> Batch:
    """What was leased.

    Frames may hold other groups too; of a group that was produced twice the first copy counts, as it did for the
    buffer. Raises BadExperience when a leased group is in no frame, in one that cannot be opened, or has a reward or a
    log-probability that is not finite, which would spoil its whole group or minibatch.
    """
    groups: dict[int, list[Trajectory]] = {}
    fleets: dict[int, str] = {}
    damage: list[str] = []
    for frame in lease.frames:
        try:
            for group_id, members in by_group(decode_frame(frame)).items():
                groups.setdefault(group_id, members)
                fleets.setdefault(group_id, frame.header.fleet)
        except FrameError as error:
            damage.append(str(error))
    missing = [group_id for group_id in lease.own_ids if group_id not in groups]
    if missing:
        causes = "; ".join(damage) or "they came in no frame"
        raise BadExperience(f"step {lease.step}: the leased groups {missing} cannot be read: {causes}", missing)
    _refuse_spoiled(lease.step, {group_id: groups[group_id] for group_id in lease.own_ids})
    in_order = [
        trajectory
        for group_id in lease.own_ids
        for trajectory in sorted(groups[group_id], key=lambda member: member.member)
    ]
    return Batch(trajectories=in_order, fleets=fleets, group_ids=lease.group_ids)


def _refuse_spoiled(step: int, groups: Mapping[int, Sequence[Trajectory]]) -> None:
    for what, is_finite in (("rewards", _finite_reward), ("log-probabilities", _finite_logprobs)):
        spoiled = [group_id for group_id, members in groups.items() if not all(map(is_finite, members))]
        if spoiled:
            raise BadExperience(f"step {step}: the leased groups {spoiled} have {what} that are not finite", spoiled)


def _finite_reward(trajectory: Trajectory) -> bool:
    return math.isfinite(trajectory.reward)


def _finite_logprobs(trajectory: Trajectory) -> bool:
    return bool(np.isfinite(trajectory.logprobs[trajectory.loss_mask]).all())


def by_group(trajectories: Sequence[Trajectory]) -> dict[int, list[Trajectory]]:
    """Groups by id, in the order of their first members."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return groups


def batch_metrics(trajectories: Sequence[Trajectory], step: int, ranks: Ranks = ALONE) -> dict[str, float]:
    """Rewards, sizes and staleness of a batch that is trained in `step`. A collective call."""
    parts = ranks.gathered([_facts(trajectory, step) for trajectory in trajectories])
    reward, staleness, generated, prompt = np.concatenate([np.reshape(part, (-1, 4)) for part in parts]).T
    known = staleness[staleness >= 0]
    return {
        "reward_mean": float(reward.mean()),
        "reward_std": float(reward.std()),
        "staleness_mean": float(known.mean()) if known.size else 0.0,
        "staleness_max": int(known.max(initial=0)),
        "generated_tokens": int(generated.sum()),
        "prompt_tokens": int(prompt.sum()),
    }


def _facts(trajectory: Trajectory, step: int) -> tuple[float, int, int, int]:
    """Reward, staleness (-1: nobody knows), generated and prompt tokens."""
    staleness = max(0, step - 1 - trajectory.oldest.step) if trajectory.spans else -1
    return trajectory.reward, staleness, int(np.count_nonzero(trajectory.loss_mask)), len(trajectory.prompt_tokens)
