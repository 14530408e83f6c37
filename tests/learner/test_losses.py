"""Every objective, correction and aggregation, loss and gradient, against float64 formulas; and against TRL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config.models import RunFile
from forebay.learner.corrections.decoupled import decoupled
from forebay.learner.corrections.group_expectation import expected_logprob, group_expectation
from forebay.learner.critic import value_loss
from forebay.learner.kl import KlEstimate, k1, k2, k3
from forebay.learner.loss import PolicyLoss
from forebay.learner.objectives.ppo import PpoClip
from forebay.learner.tokens import Sequences, Tokens, Totals
from tests.learner import reference
from tests.learner.models import random_groups, run_file

#: Relative, fp32 against float64: of the loss to the sum of its terms' sizes, of the gradient to its largest number.
NOISE = 1e-6


class Batch:
    """Random numbers for random trajectories; policies differ a little or a lot."""

    def __init__(self, seed: int, groups: int = 3, members: int = 3, spread: float = 0.6) -> None:
        rng = np.random.default_rng(seed)
        self.trajectories = random_groups(seed, groups=groups, members=members)
        lengths = [int(t.loss_mask.sum()) for t in self.trajectories]
        self.lengths, total = lengths, sum(lengths)
        self.behaviour = np.concatenate([t.logprobs[t.loss_mask] for t in self.trajectories])
        self.proximal = (self.behaviour + rng.normal(0, spread, total)).astype(np.float32)
        self.current = (self.proximal + rng.normal(0, spread / 2, total)).astype(np.float32)
        self.reference = (self.current + rng.normal(0, 0.3, total)).astype(np.float32)
        self.entropy = rng.uniform(0, 3, total).astype(np.float32)
        self.advantage = np.repeat(rng.normal(0, 1, len(lengths)), lengths).astype(np.float32)
        self.advantage += rng.normal(0, 0.1, total).astype(np.float32)

    @property
    def totals(self) -> Totals:
        return Totals(tokens=sum(self.lengths), sequences=len(self.lengths))

    def tokens(self, current: torch.Tensor) -> Tokens:
        of_token = np.repeat(np.arange(len(self.lengths)), self.lengths)
        expected = [
            expected_logprob([other for other in self.trajectories if other.group_id == t.group_id])
            for t in self.trajectories
        ]
        return Tokens(
            current_t=current,
            proximal_t=torch.from_numpy(self.proximal),
            behaviour_t=torch.from_numpy(self.behaviour),
            advantage_t=torch.from_numpy(self.advantage),
            sequences=Sequences(
                of_token_t=torch.from_numpy(of_token), lengths_b=torch.tensor(self.lengths, dtype=torch.float32)
            ),
            expected_b=torch.tensor(expected, dtype=torch.float32),
        )

    def ours(self, run: RunFile) -> tuple[float, torch.Tensor]:
        current = torch.from_numpy(self.current).requires_grad_()
        entropy = torch.from_numpy(self.entropy)
        loss = PolicyLoss.of(run)(self.tokens(current), entropy, torch.from_numpy(self.reference), self.totals)
        (gradient,) = torch.autograd.grad(loss, [current])
        assert loss.dtype == torch.float32
        return float(loss.detach()), gradient

    def plain(self, formula: dict[str, object]) -> tuple[float, float, torch.Tensor]:
        current = torch.from_numpy(self.current).double().requires_grad_()
        cuts = np.cumsum(self.lengths)[:-1]
        columns = {
            name: [part.astype(np.float64).tolist() for part in np.split(getattr(self, name), cuts)]
            for name in ("proximal", "behaviour", "advantage", "reference")
        }
        sequences = [
            reference.Sequence64(
                group=trajectory.group_id,
                current=own,
                entropy=entropy,
                **{name: parts[index] for name, parts in columns.items()},
            )
            for index, (trajectory, own, entropy) in enumerate(
                zip(
                    self.trajectories,
                    torch.split(current, self.lengths),
                    torch.split(torch.from_numpy(self.entropy).double(), self.lengths),
                    strict=True,
                )
            )
        ]
        loss, size = reference.policy_loss(sequences, formula)
        (gradient,) = torch.autograd.grad(loss, [current])
        return float(loss.detach()), size, gradient


OBJECTIVES = ["ppo", "gspo", "cispo"]
CORRECTIONS = ["none", "truncated_is", "icepop", "sequence_mask", "group_expectation", "decoupled"]
AGGREGATIONS = ["token", "sequence", "fixed"]


def assert_equal(run: RunFile, batch: Batch) -> None:
    learner = run.learner
    formula: dict[str, object] = {
        "objective": learner.objective, "correction": learner.correction, "aggregation": learner.loss_aggregation,
        "clip_low": learner.clip_low, "clip_high": learner.clip_high, "dual_clip": learner.dual_clip,
        "cap": learner.importance_cap, "icepop_low": learner.icepop_low, "icepop_high": learner.icepop_high,
        "sequence_limit": learner.sequence_limit, "divisor": run.sampler.max_new_tokens,
        "entropy_coef": learner.entropy_coef, "kl_coef": learner.kl_coef, "kl": learner.kl_estimator,
    }  # fmt: skip
    loss, gradient = batch.ours(run)
    expected, size, expected_gradient = batch.plain(formula)
    assert abs(loss - expected) <= NOISE * size
    worst = float((gradient.double() - expected_gradient).abs().max())
    assert worst <= NOISE * float(expected_gradient.abs().max())


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@settings(max_examples=8)
@given(
    seed=st.integers(0, 10_000),
    aggregation=st.sampled_from(AGGREGATIONS),
    entropy_coef=st.sampled_from([0.0, 0.1]),
    kl=st.sampled_from(["k1", "k2", "k3"]),
    kl_coef=st.sampled_from([0.0, 0.5]),
    dual_clip=st.sampled_from([None, 1.5]),
    clips=st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.05, 0.3)]),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_loss_and_gradient_equal_the_formulas(
    objective: str,
    correction: str,
    seed: int,
    aggregation: str,
    entropy_coef: float,
    kl: str,
    kl_coef: float,
    dual_clip: float | None,
    clips: tuple[float, float],
    shape: tuple[int, int],
) -> None:
    run = run_file(
        objective=objective, correction=correction, loss_aggregation=aggregation, entropy_coef=entropy_coef,
        kl_estimator=kl, kl_coef=kl_coef, dual_clip=dual_clip, clip_low=clips[0], clip_high=clips[1],
    )  # fmt: skip
    assert_equal(run, Batch(seed, *shape))


def test_each_choice_changes_the_loss() -> None:
    batch = Batch(3, groups=6, spread=2.0)
    for key, names in (("objective", OBJECTIVES), ("correction", CORRECTIONS), ("loss_aggregation", AGGREGATIONS)):
        losses = {round(batch.ours(run_file(**{key: name}))[0], 9) for name in names}
        assert len(losses) == len(names), key


def test_the_clip_by_hand() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1, 4.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0, -1.0])
    clip = PpoClip(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    assert clip.bounded(ratio, advantage).tolist() == pytest.approx([1.3, -1.5, 0.5, -0.8, 2.2, -3.0])
    assert clip.outside(ratio, advantage).tolist() == [True, False, False, True, False, True]


@pytest.mark.parametrize("objective", ["ppo", "cispo"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_exactly_synchronous_policy_has_the_plain_policy_gradient(objective: str, aggregation: str) -> None:
    batch = Batch(5)
    batch.proximal = batch.current = batch.behaviour.copy()
    share = {"token": 1 / sum(batch.lengths), "fixed": 1 / (17 * len(batch.lengths)), "sequence": None}[aggregation]
    for correction in set(CORRECTIONS) - {"group_expectation"}:
        run = run_file(objective=objective, correction=correction, loss_aggregation=aggregation)
        _, gradient = batch.ours(run)
        lengths = np.repeat(batch.lengths, batch.lengths)
        shares = share if share is not None else 1 / (len(batch.lengths) * lengths)
        np.testing.assert_allclose(gradient.numpy(), -batch.advantage * shares, rtol=1e-5)


def test_group_expectation_weights_are_bounded_where_plain_ratios_explode() -> None:
    batch = Batch(1, members=4)
    unlikely = batch.behaviour.copy()
    unlikely[: batch.lengths[0]] = -20
    batch.trajectories[0].logprobs[batch.trajectories[0].loss_mask] = -20
    batch.behaviour = unlikely
    tokens = batch.tokens(torch.from_numpy(batch.current))
    assert float(decoupled(tokens)[: batch.lengths[0]].max()) > 1e4
    assert float(group_expectation(tokens)[: batch.lengths[0]].max()) < 100


@given(seed=st.integers(0, 1000), clip=st.sampled_from([0.0, 0.2]))
def test_the_value_loss_equals_its_formula(seed: int, clip: float) -> None:
    rng = np.random.default_rng(seed)
    value, first, target = rng.normal(0, 1, (3, 20)).astype(np.float32)
    ours = torch.from_numpy(value).requires_grad_()
    loss = value_loss(ours, torch.from_numpy(first), torch.from_numpy(target), clip, tokens=30)
    (gradient,) = torch.autograd.grad(loss, [ours])
    total, expected = 0.0, np.zeros(20)
    for i, (v, v0, r) in enumerate(zip(*(x.astype(np.float64) for x in (value, first, target)), strict=True)):
        near = min(max(v, v0 - clip), v0 + clip)
        if clip and (near - r) ** 2 > (v - r) ** 2:
            total, expected[i] = total + (near - r) ** 2 / 60, (near - r) / 30 if near == v else 0.0
        else:
            total, expected[i] = total + (v - r) ** 2 / 60, (v - r) / 30
    assert float(loss.detach()) == pytest.approx(total, rel=NOISE)
    np.testing.assert_allclose(gradient.numpy(), expected, atol=NOISE * np.abs(expected).max())


@given(seed=st.integers(0, 1000))
def test_kl_estimates_agree_in_the_mean_with_the_exact_divergence(seed: int) -> None:
    rng = np.random.default_rng(seed)
    this, other = (torch.log_softmax(torch.from_numpy(rng.normal(0, 0.3, 5)), 0) for _ in range(2))
    exact = float((this.exp() * (this - other)).sum())
    for estimate in (k1, k3):
        assert float((this.exp() * estimate(this, other)).sum()) == pytest.approx(exact, abs=1e-12)
    assert (k2(this, other) >= 0).all()
    assert (k3(this, other) >= 0).all()
    assert k3(this, this).tolist() == [0.0] * 5


@given(seed=st.integers(0, 1000))
def test_gradients_of_kl_estimates_on_average(seed: int) -> None:
    """Over all tokens of a small vocabulary, weighed by their probabilities: no sampling."""
    rng = np.random.default_rng(seed)
    logits, other = torch.from_numpy(rng.normal(0, 0.5, 5)).requires_grad_(), torch.from_numpy(rng.normal(0, 0.5, 5))
    other = torch.log_softmax(other, 0)

    def gradient(of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        this = torch.log_softmax(logits, 0)
        return torch.autograd.grad(of(this), [logits])[0]

    def average(estimate: KlEstimate) -> torch.Tensor:
        return gradient(lambda this: (this.detach().exp() * estimate(this, other)).sum())

    reverse = gradient(lambda this: (this.exp() * (this - other)).sum())
    forward = gradient(lambda this: (other.exp() * (other - this)).sum())
    torch.testing.assert_close(average(k1), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(average(k2), reverse)
    torch.testing.assert_close(average(k3), forward)


def test_group_expectation_with_gspo_is_the_papers_ratio() -> None:
    batch = Batch(2)
    _, gradient = batch.ours(run_file(objective="gspo", correction="group_expectation", clip_low=0.99, clip_high=99))
    current = torch.from_numpy(batch.current).double().requires_grad_()
    advantages = np.split(batch.advantage, np.cumsum(batch.lengths)[:-1])
    parts = zip(batch.trajectories, torch.split(current, batch.lengths), advantages, strict=True)
    loss = torch.zeros((), dtype=torch.float64)
    for trajectory, own, advantage in parts:
        group = [other for other in batch.trajectories if other.group_id == trajectory.group_id]
        q = np.exp([other.logprobs[other.loss_mask].astype(np.float64).mean() for other in group])
        loss = loss - own.mean().exp() / ((q**2).sum() / q.sum()) * float(advantage.astype(np.float64).sum())
    (expected_gradient,) = torch.autograd.grad(loss / batch.totals.tokens, [current])
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


def padded(values: np.ndarray, lengths: list[int]) -> torch.Tensor:
    rows = [torch.from_numpy(part) for part in np.split(values, np.cumsum(lengths)[:-1])]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


TRL_KINDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss_type": "grpo"}, {"loss_aggregation": "sequence"}),
    ({"loss_type": "bnpo"}, {"loss_aggregation": "token"}),
    ({"loss_type": "dr_grpo"}, {"loss_aggregation": "fixed"}),
    ({"loss_type": "dapo"}, {"loss_aggregation": "token"}),
    (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_aggregation": "sequence", "objective": "gspo"},
    ),
    ({"loss_type": "cispo", "epsilon_high": 1.3}, {"objective": "cispo", "clip_low": 0.999999}),
    ({"loss_type": "grpo", "beta": 0.3}, {"loss_aggregation": "sequence", "kl_coef": 0.3}),
    ({"loss_type": "bnpo", "delta": 1.6}, {"dual_clip": 1.6}),
    ({"loss_type": "bnpo", "entropy_coef": 0.1}, {"entropy_coef": 0.1}),
    ({"loss_type": "dapo", "is": True}, {"correction": "truncated_is"}),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), TRL_KINDS)
def test_loss_and_gradient_equal_trls(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """TRL's own `GRPOTrainer._compute_loss`, given a model's answers; its trainer around it is not needed."""
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    batch = Batch(11, spread=0.4)
    batch.advantage = np.repeat(np.random.default_rng(0).normal(0, 1, len(batch.lengths)), batch.lengths).astype("f4")
    run = run_file(clip_low=0.2, clip_high=0.3, **{"correction": "none", **ours}) if "clip_low" not in ours else (
        run_file(clip_high=0.3, **{"correction": "none", **ours})
    )  # fmt: skip
    loss, gradient = batch.ours(run)
    current = padded(batch.current, batch.lengths).requires_grad_()
    mask = padded(np.ones(sum(batch.lengths), np.float32), batch.lengths)
    their_loss = grpo_trainer.GRPOTrainer._compute_loss(_trl_trainer(batch, current, theirs), None, _trl(batch, mask))
    (their_gradient,) = torch.autograd.grad(their_loss, [current])
    assert loss == pytest.approx(float(their_loss.detach()), rel=3e-6)
    np.testing.assert_allclose(gradient, their_gradient[mask.bool()], atol=1e-6 * float(gradient.abs().max()))


def _trl(batch: Batch, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    starts = np.cumsum([0, *batch.lengths[:-1]])
    ratio = np.minimum(np.exp(batch.proximal - batch.behaviour), 2.0).astype(np.float32)
    return {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.from_numpy(batch.advantage[starts]),
        "old_per_token_logps": padded(batch.proximal, batch.lengths),
        "ref_per_token_logps": padded(batch.reference, batch.lengths),
        "importance_sampling_ratio": padded(ratio, batch.lengths),
        "num_items_in_batch": mask.sum(),
    }


def _trl_trainer(batch: Batch, current: torch.Tensor, kind: dict[str, Any]) -> SimpleNamespace:
    entropies = padded(batch.entropy, batch.lengths)
    metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x,
        sync_gradients=True,
    )  # fmt: skip
    return SimpleNamespace(
        **{
            "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
            "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.3,
            "args": SimpleNamespace(
                delta=kind.get("delta"), use_bias_correction_kl=False, steps_per_generation=1
            ),
            "use_vllm": bool(kind.get("is")), "vllm_importance_sampling_correction": bool(kind.get("is")),
            "model": SimpleNamespace(training=True), "current_gradient_accumulation_steps": 1,
            "max_completion_length": 17, "accelerator": accelerator, "_metrics": metrics,
            "_entropy_bonus_enabled": "entropy_coef" in kind, "use_adaptive_entropy": False,
            "_get_per_token_logps_and_entropies": lambda *a, **k: (current, entropies, None),
            **{key: value for key, value in kind.items() if key not in ("delta", "is")},
        }
    )  # fmt: skip
