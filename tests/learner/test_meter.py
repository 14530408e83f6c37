"""What a step's metrics say, by hand: sampler against learner, before against after, stale against fresh."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from forebay.learner.guards import DegenerateRewards, flat_groups
from forebay.learner.meter import Measured, Pass, StepMeter
from forebay.learner.sample import Sample
from forebay.wire.trajectory import VersionSpan
from forebay.wire.version import Version
from tests.learner.models import random_groups


def sample(tokens: int, *spans: tuple[int, int]) -> Sample:
    """`spans`: first token and step of the weights."""
    base = random_groups(0)[0]
    return Sample(
        trajectory=replace(
            base, tokens=np.zeros(tokens, np.int32), loss_mask=np.ones(tokens, np.bool_),
            logprobs=np.full(tokens, -1, np.float32),
            spans=tuple(VersionSpan(start=start, version=Version(1, step)) for start, step in spans),
        )
    )  # fmt: skip


def measured(
    samples: Sequence[Sample],
    behaviour: Sequence[float],
    proximal: Sequence[float],
    current: Sequence[float],
    clipped: Sequence[float] | None = None,
    weight: Sequence[float] | None = None,
) -> Measured:
    """Columns as numbers; entropy 1 everywhere, a loss of 1/8 a token, the weight uncut unless given."""
    b, p, c = (np.asarray(column, np.float64) for column in (behaviour, proximal, current))
    return Measured(
        current_t=c, proximal_t=p, behaviour_t=b, entropy_t=np.ones(len(b)), samples=samples, loss=len(b) / 8,
        weight_t=np.exp(p - b) if weight is None else np.asarray(weight),
        clipped_t=np.zeros(len(b)) if clipped is None else np.asarray(clipped),
    )  # fmt: skip


def k3(d: float) -> float:
    return math.exp(d) - 1 - d


def test_a_minibatch_comes_to_the_host_as_it_was() -> None:
    names = ("current_t", "proximal_t", "behaviour_t", "entropy_t", "weight_t", "clipped_t")
    lengths, random = (3, 0, 1), torch.Generator().manual_seed(0)
    passes = [
        Pass(
            columns={name: torch.randn(length, generator=random) for name in names},
            loss=torch.tensor(float(length)),
            samples=[sample(length, (0, 1))],
        )
        for length in lengths
    ]
    for one, found in zip(passes, Measured.of(passes), strict=True):
        assert (found.loss, found.samples) == (float(one.loss), one.samples)
        for name in names:
            assert getattr(found, name).tolist() == one.columns[name].tolist()


def test_the_distance_to_the_reference_is_told_where_there_is_one() -> None:
    meter, scored = StepMeter(), replace(sample(2, (0, 4)), reference_t=np.asarray([-1.0, -3.0], np.float32))
    meter.add(measured([sample(1, (0, 4))], [-1.0], [-1.0], [-5.0]), first=True)
    assert "reference_kl" not in meter.metrics(step=5)
    meter.add(measured([scored], [-1.0, -2.0], [-1.0, -2.0], [-1.5, -2.0]), first=True)
    assert meter.metrics(step=5)["reference_kl"] == pytest.approx((k3(0.5) + k3(-1.0)) / 2)
    assert meter.metrics(step=5)["loss"] == 3 / 8


def test_a_sampler_that_computes_other_numbers_is_a_mismatch_and_no_change_of_the_policy() -> None:
    meter = StepMeter()
    meter.add(measured([sample(2, (0, 4))], [-1.0, -2.0], [-1.1, -1.8], [-1.1, -1.8]), first=True)
    found = meter.metrics(step=5)
    assert found["policy_kl"] == 0
    assert found["mismatch"] == pytest.approx(0.15)
    assert found["mismatch_kl"] == pytest.approx((k3(-0.1) + k3(0.2)) / 2)
    assert found["mismatch_kl"] == pytest.approx(found["kl"])
    assert found["mismatch_staleness"] == 0


def test_updates_are_a_change_of_the_policy_and_no_mismatch() -> None:
    meter = StepMeter()
    samples = [sample(2, (0, 4))]
    meter.add(measured(samples, [-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0]), first=True)
    meter.add(measured(samples, [-1.0, -2.0], [-1.0, -2.0], [-1.3, -1.6]), first=False)
    found = meter.metrics(step=5)
    assert found["mismatch"] == found["mismatch_kl"] == found["kl"] == 0
    assert found["policy_kl"] == pytest.approx((k3(-0.3) + k3(0.4)) / 4)
    assert found["trained_tokens"] == 2


def test_the_second_minibatch_of_a_step_is_measured_against_how_the_step_began() -> None:
    meter = StepMeter()
    meter.add(measured([sample(2, (0, 4))], [-1.0, -2.0], [-1.0, -2.0], [-1.3, -1.6]), first=True)
    found = meter.metrics(step=5)
    assert found["mismatch"] == found["mismatch_kl"] == 0
    assert found["policy_kl"] == found["kl"] == pytest.approx((k3(-0.3) + k3(0.4)) / 2)


def test_staleness_is_neither() -> None:
    """Tokens of older weights differ from the learner; those of the newest weights do not."""
    meter = StepMeter()
    behaviour, learner = [-1.0, -1.0, -1.0, -1.0], [-1.5, -0.5, -1.0, -1.0]
    meter.add(measured([sample(4, (0, 1), (2, 3))], behaviour, learner, learner), first=True)
    found = meter.metrics(step=5)
    assert found["mismatch"] == found["policy_kl"] == 0
    assert found["mismatch_staleness"] == 1, "the freshest tokens are of step 3, where they could be of step 4"
    assert found["kl"] == pytest.approx((k3(-0.5) + k3(0.5)) / 4)
    assert found["ratio_minus_1"] == pytest.approx((1 - math.exp(-0.5) + math.exp(0.5) - 1) / 4)


def test_what_was_clipped_and_cut_is_counted_over_all_epochs() -> None:
    meter = StepMeter()
    samples, zeros = [sample(2, (0, 4))], [0.0, 0.0]
    meter.add(measured(samples, zeros, zeros, zeros, clipped=[1, 0], weight=[0.5, 1.0]), first=True)
    meter.add(measured(samples, zeros, zeros, zeros), first=False)
    found = meter.metrics(step=5)
    assert (found["clip_fraction"], found["capped_fraction"]) == (0.25, 0.25)
    assert found["entropy"] == 1


def test_micro_batches_add_up() -> None:
    whole, parts = StepMeter(), StepMeter()
    rng = np.random.default_rng(0)
    columns = rng.normal(-1, 0.3, (3, 6))
    samples = [sample(2, (0, 4)), sample(4, (0, 3), (1, 4))]
    whole.add(measured(samples, *columns), first=True)
    parts.add(measured(samples[:1], *columns[:, :2]), first=True)
    parts.add(measured(samples[1:], *columns[:, 2:]), first=True)
    assert parts.metrics(5) == pytest.approx(whole.metrics(5))


def rewarded(*groups: Sequence[float]) -> list[Sample]:
    base = random_groups(0)[0]
    return [
        Sample(trajectory=replace(base, group_id=group, member=member, reward=reward))
        for group, rewards in enumerate(groups)
        for member, reward in enumerate(rewards)
    ]


def test_rewards_that_tell_nothing_apart_raise_an_alarm_once_they_last(caplog: pytest.LogCaptureFixture) -> None:
    degenerate = DegenerateRewards(patience=3)

    def note(step: int, *groups: Sequence[float]) -> dict[str, float]:
        return degenerate.note(step, flat_groups([sample.trajectory for sample in rewarded(*groups)]))

    with caplog.at_level(logging.WARNING):
        assert note(1, [1, 1], [0, 0]) == {"zero_variance_groups": 1, "degenerate_steps": 1}
        assert note(2, [1, 1], [0, 1])["degenerate_steps"] == 0, "one group that does is enough"
        assert note(3, [1, 1], [0, 1])["zero_variance_groups"] == 0.5
        for step in (4, 5):
            note(step, [1, 1], [0, 0])
        assert not caplog.records
        assert note(6, [1, 1], [0, 0])["degenerate_steps"] == 3
        assert ["no group of the last 3 steps" in record.message for record in caplog.records] == [True]
        for step in (7, 8):
            note(step, [2, 2])
        assert len(caplog.records) == 1, "an alarm that rings every step is not listened to"
        note(9, [2, 2])
        assert len(caplog.records) == 2
