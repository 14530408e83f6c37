"""The DeepSpeed engine at every stage and precision, in this one process."""

from __future__ import annotations

import math

import pytest
import torch

from forebay.config.learner_section import LearnerSection
from forebay.learner.engine import Engine, deepspeed_settings
from forebay.learner.packing import MicroBatch, pack
from forebay.learner.policy import Policy
from forebay.learner.sample import with_advantage
from tests.learner.models import random_groups, tiny_llama

KINDS = [
    ("float32", 0), ("float32", 1), ("float32", 2), ("float32", 3), ("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 3),
]  # fmt: skip
#: Also the smallest weights are taken apart.
EVERYWHERE = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def engine(
    dtype: str = "float32", stage: int = 0, seed: int = 0, *, offload: bool = False
) -> Engine[tuple[torch.Tensor, torch.Tensor]]:
    settings = LearnerSection(
        compute_dtype=dtype,  # type: ignore[arg-type]
        zero_stage=stage,  # type: ignore[arg-type]
        lr=1e-3,
        offload_optimizer=offload,
        deepspeed=EVERYWHERE if stage == 3 else {},
    )
    return Engine(Policy(tiny_llama(seed)), settings)


def batches(seed: int, limit: int = 40) -> list[MicroBatch]:
    return pack([with_advantage(t, t.reward) for t in random_groups(seed)], limit)


def train(engine: Engine[tuple[torch.Tensor, torch.Tensor]], micros: list[MicroBatch], scale: float = 1.0) -> float:
    tokens = sum(micro.targets for micro in micros)
    for micro in micros:
        logprob_t, _ = engine.score(micro)
        engine.accumulate(-(logprob_t * micro.advantage_t).sum() * scale / tokens)
    return engine.update(1e-3).grad_norm


def weights(engine: Engine[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.state()}


@pytest.mark.parametrize(("dtype", "stage"), KINDS)
def test_every_stage_makes_the_same_updates_as_plain_adamw(dtype: str, stage: int) -> None:
    ours = engine(dtype, stage)
    plain = Policy(tiny_llama())
    if dtype == "bfloat16":
        plain = plain.bfloat16()  # type: ignore[assignment]
    master = {name: p.detach().float().clone().requires_grad_() for name, p in tiny_llama().named_parameters()}
    optimizer = torch.optim.AdamW(master.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        micros = batches(step)
        assert len(micros) > 1
        norm = train(ours, micros)
        tokens = sum(micro.targets for micro in micros)
        for micro in micros:
            plain.zero_grad()
            logprob_t, _ = plain(micro)
            (-(logprob_t * micro.advantage_t).sum() / tokens).backward()
            for name, p in plain.model.named_parameters():
                gradient = p.grad.float()  # type: ignore[union-attr]
                master[name].grad = gradient if master[name].grad is None else master[name].grad + gradient
        expected = float(torch.nn.utils.clip_grad_norm_(master.values(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in plain.model.named_parameters():
                p.copy_(master[name])
        assert norm == pytest.approx(expected, rel=1e-4 if dtype == "float32" else 2e-2)
    for name, tensor in master.items():
        difference = (weights(ours)[f"master/model.{name}"] - tensor.detach()).abs()
        # In bfloat16 the last bit of a master (1e-8) decides how a weight rounds, and small gradients then differ.
        assert float(difference.max() if dtype == "float32" else difference.mean()) < 1e-4


@pytest.mark.parametrize(("dtype", "stage"), KINDS)
@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_never_reaches_the_weights(dtype: str, stage: int, scale: float) -> None:
    poisoned, clean = engine(dtype, stage), engine(dtype, stage)
    train(poisoned, batches(0))
    train(clean, batches(0))
    before = weights(poisoned)
    assert math.isinf(train(poisoned, batches(1), scale))
    for name, tensor in weights(poisoned).items():
        assert torch.equal(tensor, before[name]), name
    train(poisoned, batches(2))
    train(clean, batches(2))
    for name, tensor in weights(poisoned).items():
        assert torch.equal(tensor, weights(clean)[name]), name


@pytest.mark.parametrize(("dtype", "stage"), KINDS)
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(dtype: str, stage: int) -> None:
    """The loss is finite; one number of one gradient is not."""
    ours = engine(dtype, stage)
    train(ours, batches(0))
    before, spoiled = weights(ours), next(ours.module.parameters())
    hook = spoiled.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), math.nan))
    assert math.isinf(train(ours, batches(1)))
    hook.remove()
    assert ours.optimizer_updates() == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(ours).items())
    assert math.isfinite(train(ours, batches(2)))
    assert ours.optimizer_updates() == 2


@pytest.mark.parametrize(("dtype", "stage"), KINDS)
def test_restored_state_goes_on_bit_for_bit(dtype: str, stage: int) -> None:
    straight = engine(dtype, stage)
    for step in range(2):
        train(straight, batches(step))
    saved, updates = weights(straight), straight.optimizer_updates()
    resumed = engine(dtype, stage, seed=5)
    resumed.restore(saved, updates)
    for step in range(2, 4):
        train(straight, batches(step))
        train(resumed, batches(step))
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, weights(straight)[name]), name


@pytest.mark.parametrize(("dtype", "stage"), [("float32", 1), ("bfloat16", 2), ("bfloat16", 3)])
def test_an_offloaded_optimizer_makes_the_same_updates_and_goes_on(dtype: str, stage: int) -> None:
    there, here = engine(dtype, stage, offload=True), engine(dtype, stage)
    for step in range(2):
        assert train(there, batches(step)) == pytest.approx(train(here, batches(step)), rel=1e-5)
    saved = weights(there)
    resumed = engine(dtype, stage, seed=3, offload=True)
    resumed.restore(saved, updates=2)
    for ours in (there, here, resumed):
        train(ours, batches(2))
    for name, tensor in weights(there).items():
        assert torch.equal(weights(resumed)[name], tensor), name
        assert float((weights(here)[name] - tensor).abs().max()) < 1e-4, name


def test_run_file_settings_are_merged_into_deepspeeds() -> None:
    settings = LearnerSection(deepspeed={"zero_optimization": {"reduce_bucket_size": 7}, "wall_clock_breakdown": True})
    merged = deepspeed_settings(settings)
    assert merged["zero_optimization"]["reduce_bucket_size"] == 7
    assert merged["zero_optimization"]["stage"] == 1
    assert merged["wall_clock_breakdown"] is True
