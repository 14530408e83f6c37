"""Who is named when the KL is too high."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forebay.learner.drift import Drift
from forebay.learner.sample import Sample
from forebay.wire.trajectory import VersionSpan
from forebay.wire.version import Version
from tests.learner.models import random_groups

FLEETS = {0: "near", 1: "near", 2: "far", 3: "far"}


def one_version_each(step: int = 3) -> list[Sample]:
    """One member of each of four groups, five trained tokens each."""
    base = random_groups(0)[0]
    return [
        Sample(
            trajectory=replace(
                base, group_id=group, tokens=np.zeros(5, np.int32), loss_mask=np.ones(5, np.bool_),
                logprobs=np.full(5, -1, np.float32), spans=(VersionSpan(start=0, version=Version(1, step)),),
            )
        )
        for group in range(4)
    ]  # fmt: skip


def test_the_source_that_lifts_the_mean_is_named_with_its_worst_group() -> None:
    drift = Drift("digits", FLEETS)
    kl = np.repeat([1.0, 2.0, 3.0, 30.0], 5)
    drift.add(one_version_each(), kl)
    assert drift.mean() == pytest.approx(9.0)
    told = drift.told(8.0)
    assert "fleet far, version 1.3, task digits" in told
    assert "16.5 over 10 tokens" in told
    assert "group 3 before all" in told


def test_many_tokens_that_are_too_high_count_more_than_few_that_are_a_little_higher() -> None:
    drift = Drift("digits", FLEETS)
    drift.add(one_version_each()[:3], np.asarray([*[12.0] * 10, *[15.0] * 5]))
    assert "fleet near" in drift.told(5.0)


def test_tokens_of_one_trajectory_belong_to_the_versions_that_wrote_them() -> None:
    sample = one_version_each()[2]
    spans = (VersionSpan(start=0, version=Version(1, 3)), VersionSpan(start=3, version=Version(2, 4)))
    mask = np.asarray([True, False, True, True, True])
    sample = Sample(trajectory=replace(sample.trajectory, spans=spans, loss_mask=mask))
    assert sample.span_t.tolist() == [0, 0, 1, 1]
    drift = Drift("digits", FLEETS)
    drift.add([sample], np.asarray([1.0, 1.0, 20.0, 40.0]))
    assert "version 2.4, task digits (30 over 2 tokens" in drift.told(10.0)


def test_without_tokens_there_is_no_drift() -> None:
    assert Drift("digits", FLEETS).mean() == 0
