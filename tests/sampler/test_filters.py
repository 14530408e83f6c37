"""Which groups are filtered out, and which go first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.config.learner_section import LearnerSection
from forebay.sampler.filters import why_filtered
from forebay.sampler.shipper import priority_of
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.version import Version


def member(number: int, reward: float, finish_reason: str) -> Trajectory:
    return Trajectory(
        group_id=0, member=number, prompt_tokens=np.arange(2, dtype=np.int32), tokens=np.arange(3, dtype=np.int32),
        loss_mask=np.ones(3, np.bool_), logprobs=np.zeros(3, np.float32),
        spans=(VersionSpan(start=0, version=Version(1, 0)),), temperature=1.0, top_p=1.0, reward=reward,
        finish_reason=finish_reason,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "finish", "settings", "reason"),
    [
        ([1.0, 1.0], "ss", {"drop_zero_variance": True}, "zero_variance"),
        ([1.0, 1.0 + 1e-9], "ss", {"drop_zero_variance": True}, "zero_variance"),
        ([1.0, 0.0], "ss", {"drop_zero_variance": True}, ""),
        ([1.0], "s", {"drop_zero_variance": True}, ""),
        ([1.0, 1.0], "ss", {}, ""),
        ([1.0, 0.0], "ll", {"drop_overlong": True}, "overlong"),
        ([1.0, 0.0], "ls", {"drop_overlong": True}, ""),
        ([1.0, 0.0], "ll", {}, ""),
    ],
)
def test_a_group_is_filtered_for_a_reason(
    rewards: list[float], finish: str, settings: dict[str, Any], reason: str
) -> None:
    names = {"s": "stop", "l": "length"}
    group = [member(n, reward, names[how]) for n, (reward, how) in enumerate(zip(rewards, finish, strict=True))]
    assert why_filtered(group, LearnerSection(**settings)) == reason


def test_groups_whose_rewards_differ_most_go_first() -> None:
    groups = [[member(n, reward, "stop") for n, reward in enumerate(rewards)] for rewards in ((1, 1), (0, 1), (0, 4))]
    assert [priority_of(group) for group in groups] == [0.0, 0.5, 2.0]
