"""Advantages, objective, learning rate, packing: small pieces, exact answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config.models import LearnerSection
from forebay.learner.advantages import group_advantages, with_advantages
from forebay.learner.lr import learning_rate
from forebay.learner.objective import Objective, behaviour_kl
from forebay.learner.packing import Sample, pack
from tests.learner.models import random_groups


def test_advantages_are_centred_and_scaled_by_the_population_deviation() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], normalize=True) == [1.0, -1.0, -1.0, 1.0]
    assert group_advantages([1.0, 0.0, 0.0, 1.0], normalize=False) == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 8, [1 / 3, 1 / 3, 1 / 3]])
@pytest.mark.parametrize("normalize", [True, False])
def test_groups_of_one_and_of_equal_rewards_have_no_advantage(rewards: list[float], normalize: bool) -> None:
    assert group_advantages(rewards, normalize=normalize) == [0.0] * len(rewards)


def test_advantages_do_not_mix_groups() -> None:
    groups = with_advantages(random_groups(0), normalize=True)
    assert [len(group) for group in groups] == [3] * 4
    for group in groups:
        assert sum(sample.advantage for sample in group) == pytest.approx(0, abs=1e-12)


def test_the_loss_is_what_its_formula_says() -> None:
    objective = Objective(clip_low=0.2, clip_high=0.3, importance_cap=2.0, entropy_coef=0.1)
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0], dtype=torch.float64)
    weight = torch.tensor([0.5, 4.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    proximal = torch.full((5,), -2.0, dtype=torch.float64)
    entropy = torch.ones(5, dtype=torch.float64)
    loss = objective.loss(proximal + ratio.log(), entropy, proximal, proximal - weight.log(), advantage, tokens=10)
    surrogate = 0.5 * 1.3 + 2.0 * -1.5 + 0.5 + -0.8 + 2.2
    assert loss.item() == pytest.approx(-surrogate / 10 - 0.1 * 5 / 10)
    clipped = objective.clipped(proximal + ratio.log(), proximal, advantage)
    assert clipped.tolist() == [True, False, False, True, False]


def test_kl_is_zero_for_the_same_policy_and_positive_otherwise() -> None:
    logprob = torch.tensor([-1.0, -2.0, -3.0])
    assert behaviour_kl(logprob, logprob).tolist() == [0.0, 0.0, 0.0]
    assert (behaviour_kl(logprob, logprob + torch.tensor([0.5, -0.5, 2.0])) > 0).all()


def test_the_learning_rate_warms_up_and_ends_low() -> None:
    settings_ = LearnerSection(lr=1.0, lr_warmup_steps=3, lr_schedule="cosine", steps=10)
    rates = [learning_rate(settings_, step) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert 0 < rates[-1] < 0.1
    constant = LearnerSection(lr=1.0)
    assert {learning_rate(constant, step) for step in range(1, 101)} == {1.0}


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), limit=st.integers(1, 200), groups=st.integers(1, 8), members=st.integers(1, 5))
def test_packing_loses_and_repeats_nothing(seed: int, limit: int, groups: int, members: int) -> None:
    samples = [Sample(trajectory=t, advantage=1.0) for t in random_groups(seed, groups=groups, members=members)]
    batches = pack(samples, limit)
    seen = [(s.trajectory.group_id, s.trajectory.member) for batch in batches for s in batch.samples]
    assert sorted(seen) == [(s.trajectory.group_id, s.trajectory.member) for s in samples]
    assert sum(batch.targets for batch in batches) == sum(sample.targets for sample in samples)
    for batch in batches:
        assert batch.tokens_n.numel() <= limit or len(batch.samples) == 1
        layout = batch.layout
        assert torch.equal(layout.token_r[layout.row_n], torch.arange(batch.tokens_n.numel()))
        assert len(layout.token_r) == batch.tokens_n.numel() + len(layout.padding)
        behaviour = np.concatenate([s.trajectory.logprobs[s.trajectory.loss_mask] for s in batch.samples])
        assert np.array_equal(batch.behaviour_t.numpy(), behaviour)
