"""Estimators against hand-computed numbers and what must hold for all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.learner_section import LearnerSection
from forebay.learner.advantages.dr_grpo import dr_grpo
from forebay.learner.advantages.episode import Episode, Estimator, Floats
from forebay.learner.advantages.gae import episode_gae, gae, gae_returns
from forebay.learner.advantages.grpo import grpo
from forebay.learner.advantages.reinforce_pp import reinforce_pp
from forebay.learner.advantages.reinforce_pp_baseline import reinforce_pp_baseline
from forebay.learner.advantages.rewards import RewardShaping
from forebay.learner.advantages.rloo import rloo
from forebay.learner.advantages.table import estimator
from tests.learner.models import random_groups

GROUP_BASED: list[Estimator] = [grpo, dr_grpo, rloo, reinforce_pp_baseline]
rewards = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=8).filter(lambda r: float(np.std(r)) > 1e-3)


def episodes(*outcomes: float, tokens: int = 2) -> list[Episode]:
    return [Episode(reward=reward, tokens=tokens) for reward in outcomes]


def first(advantages: list[list[Floats]]) -> list[list[float]]:
    """One number a trajectory; all its tokens must have it."""
    for group in advantages:
        for array in group:
            assert (array == array[0]).all()
    return [[float(array[0]) for array in group] for group in advantages]


def test_group_estimators_by_hand() -> None:
    group = [episodes(1.0, 0.0, 0.0, 1.0, 0.5)]
    deviation = math.sqrt(4 * 0.25 / 5)
    expected = [0.5, -0.5, -0.5, 0.5, 0.0]
    assert first(dr_grpo(group)) == [expected]
    assert first(grpo(group)) == [[pytest.approx(value / deviation) for value in expected]]
    assert first(rloo(group)) == [[1.0 - 0.375, 0.0 - 0.625, 0.0 - 0.625, 1.0 - 0.375, 0.0]]


def test_the_baseline_form_of_reinforce_pp_scales_by_the_batch() -> None:
    found = first(reinforce_pp_baseline([episodes(1.0, 0.0), episodes(3.0, -3.0)]))
    deviation = math.sqrt((2 * 0.25 + 2 * 9) / 4)
    assert found == [[pytest.approx(x / deviation) for x in part] for part in ([0.5, -0.5], [3.0, -3.0])]


def test_reinforce_pp_discounts_and_normalises_over_tokens() -> None:
    penalised = Episode(reward=1.0, tokens=2, penalty_t=np.asarray([0.2, 0.4]))
    other = Episode(reward=0.0, tokens=1)
    raw = np.asarray([-0.2 + 0.5 * 0.6, 0.6, 0.0])
    expected = (raw - raw.mean()) / raw.std()
    found = reinforce_pp([[penalised], [other]], gamma=0.5)
    np.testing.assert_allclose(np.concatenate([found[0][0], found[1][0]]), expected)


def test_gae_by_hand() -> None:
    episode = Episode(reward=1.0, tokens=3, penalty_t=np.asarray([0.1, 0.0, 0.0]), value_t=np.asarray([0.3, 0.5, 0.4]))
    gamma, lam = 0.9, 0.8
    deltas = [-0.1 + 0.9 * 0.5 - 0.3, 0.9 * 0.4 - 0.5, 1.0 - 0.4]
    last = deltas[2]
    middle = deltas[1] + 0.72 * last
    start = deltas[0] + 0.72 * middle
    np.testing.assert_allclose(episode_gae(episode, gamma, lam), [start, middle, last])
    np.testing.assert_allclose(gae_returns(episode, gamma, lam), [start + 0.3, middle + 0.5, last + 0.4])


@given(values=st.lists(st.floats(-3, 3), min_size=1, max_size=9), reward=st.floats(-3, 3))
def test_gae_with_lambda_1_is_the_return_minus_the_value(values: list[float], reward: float) -> None:
    episode = Episode(reward=reward, tokens=len(values), value_t=np.asarray(values))
    np.testing.assert_allclose(episode_gae(episode, 1.0, 1.0), reward - np.asarray(values), atol=1e-9)


@given(values=st.lists(st.floats(-3, 3), min_size=2, max_size=9), reward=st.floats(-3, 3), gamma=st.floats(0.1, 1))
def test_gae_with_lambda_0_is_the_one_step_error(values: list[float], reward: float, gamma: float) -> None:
    episode = Episode(reward=reward, tokens=len(values), value_t=np.asarray(values))
    found = episode_gae(episode, gamma, 0.0)
    assert found[0] == pytest.approx(gamma * values[1] - values[0])
    assert found[-1] == pytest.approx(reward - values[-1])


def test_gae_is_normalised_over_the_batch_and_the_returns_are_not() -> None:
    group = [[Episode(reward=r, tokens=3, value_t=np.zeros(3)) for r in (5.0, 1.0)]]
    flat = np.concatenate(gae(group, 0.9, 0.9)[0])
    assert (flat.mean(), flat.std()) == (pytest.approx(0), pytest.approx(1))
    assert gae_returns(group[0][0], 1.0, 1.0).tolist() == [5.0] * 3


@given(outcomes=rewards, scale=st.floats(0.1, 10), shift=st.floats(-10, 10))
def test_grpo_does_not_see_affine_changes_of_the_reward(outcomes: list[float], scale: float, shift: float) -> None:
    plain = first(grpo([episodes(*outcomes)]))[0]
    changed = first(grpo([episodes(*(scale * r + shift for r in outcomes))]))[0]
    np.testing.assert_allclose(changed, plain, rtol=1e-5, atol=1e-5)


@given(outcomes=rewards)
def test_rloo_is_each_against_the_mean_of_the_others_and_sums_to_0(outcomes: list[float]) -> None:
    found = first(rloo([episodes(*outcomes)]))[0]
    for index, reward in enumerate(outcomes):
        others = outcomes[:index] + outcomes[index + 1 :]
        assert found[index] == pytest.approx(reward - sum(others) / len(others), abs=1e-9)
    assert sum(found) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("estimate", GROUP_BASED)
@pytest.mark.parametrize("outcomes", [[0.7], [0.1] * 8, [1 / 3, 1 / 3, 1 / 3], [math.nan, 2.0], [math.nan] * 3])
def test_groups_of_one_and_of_equal_rewards_get_exactly_0(estimate: Estimator, outcomes: list[float]) -> None:
    informative = episodes(1.0, 0.0)
    silent, spoken = first(estimate([episodes(*outcomes), informative]))
    assert silent == [0.0] * len(outcomes)
    assert spoken[0] > 0 > spoken[1]


@pytest.mark.parametrize("estimate", GROUP_BASED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_counts_for_nothing(estimate: Estimator, bad: float) -> None:
    with_bad = first(estimate([episodes(1.0, bad, 0.0, 0.25)]))[0]
    without = first(estimate([episodes(1.0, 0.0, 0.25)]))[0]
    assert with_bad[1] == 0.0
    assert [with_bad[0], *with_bad[2:]] == pytest.approx(without)


def test_reinforce_pp_survives_what_is_not_finite_and_a_batch_without_spread() -> None:
    found = reinforce_pp([episodes(1.0, math.nan, 0.0)], gamma=1.0)[0]
    assert [float(array[0]) for array in found] == [1.0, 0.0, -1.0]
    assert [float(array[0]) for array in reinforce_pp([episodes(1.0, 1.0)], gamma=1.0)[0]] == [0.0, 0.0]


def test_penalties_count_in_group_estimators() -> None:
    group = [Episode(reward=1.0, tokens=2, penalty_t=np.asarray([0.5, 0.5])), *episodes(2.0)]
    assert first(dr_grpo([group])) == [[-1.0, 1.0]]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"])
def test_every_name_gives_an_estimator_that_keeps_the_batchs_shape(name: str) -> None:
    groups = [
        [Episode(reward=float(i), tokens=3 + i, value_t=np.zeros(3 + i)) for i in range(size)] for size in (1, 2, 5)
    ]
    found = estimator(LearnerSection(estimator=name))(groups)  # type: ignore[arg-type]
    assert [[len(array) for array in group] for group in found] == [[e.tokens for e in group] for group in groups]


def test_each_name_is_another_estimator() -> None:
    groups = [[Episode(reward=float(i * i), tokens=2 + i, value_t=np.linspace(0, i, 2 + i)) for i in range(4)]]
    groups += [[Episode(reward=float(i), tokens=2, value_t=np.full(2, 0.1)) for i in range(2)]]
    names = ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"]
    found = [estimator(LearnerSection(estimator=name))(groups) for name in names]  # type: ignore[arg-type]
    assert len({tuple(np.concatenate([np.concatenate(g) for g in groups_]).round(6)) for groups_ in found}) == 6


def test_over_long_replies_pay_more_the_longer_they_are() -> None:
    shaping = RewardShaping(max_new_tokens=10, overlong_tokens=4, overlong_penalty=2.0)
    base = random_groups(0)[0]
    lengths = [5, 6, 7, 8, 10, 12]
    replies = [replace(base, tokens=np.zeros(n, np.int32), reward=1.0) for n in lengths]
    assert shaping(replies).tolist() == [1.0, 1.0, 0.5, 0.0, -1.0, -1.0]
    assert RewardShaping(max_new_tokens=10)(replies).tolist() == [1.0] * 6


def test_rewards_are_normalised_then_cut() -> None:
    batch = [replace(t, reward=r) for t, r in zip(random_groups(0), [10.0, 0.0, 0.0, 0.0], strict=False)]
    normal = RewardShaping(max_new_tokens=99, normalize=True)(batch)
    np.testing.assert_allclose(normal, [math.sqrt(3), *[-1 / math.sqrt(3)] * 3])
    cut = RewardShaping(max_new_tokens=99, normalize=True, clip=(-0.5, 1.0))(batch)
    assert cut.tolist() == [1.0, -0.5, -0.5, -0.5]
