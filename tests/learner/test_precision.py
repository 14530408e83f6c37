"""Each tier of precision is what it says: master weights, compute, sums of gradients."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import deepspeed
import pytest
import torch
from torch import nn

from forebay.config.learner_section import LearnerSection
from forebay.errors import UsageError
from forebay.learner.engine import Engine, Update
from forebay.learner.errors import NonFiniteTraining
from forebay.learner.guards import PATIENCE, Refusals
from tests.learner.models import random_groups
from tests.learner.trainers import batch_of, run_file, scores, trainer_of

TIERS = [
    ("float32", "float32", 0),
    ("float32", "float32", 2),
    ("bfloat16", "float32", 1),
    ("bfloat16", "float32", 2),
    ("bfloat16", "bfloat16", 1),
    ("bfloat16", "bfloat16", 2),
    ("float16", "float32", 1),
    ("float16", "float32", 2),
]


class Line(nn.Module):
    """weight * x, so that x is the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sum(self.weight.float() * x)


@pytest.fixture(autouse=True)
def _float16_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes in float16 on every CPU, slowly; DeepSpeed asks whether it is fast, which is no matter here."""
    accelerator = type(deepspeed.accelerator.get_accelerator())
    monkeypatch.setattr(accelerator, "is_fp16_supported", lambda self: True)


def engine(compute: str, reduce: str = "float32", stage: int = 1) -> Engine[torch.Tensor]:
    settings = LearnerSection(compute_dtype=compute, reduce_dtype=reduce, zero_stage=stage, lr=1e-3, max_grad_norm=1e9)  # type: ignore[arg-type]
    return Engine(Line(), settings)


def train(engine: Engine[torch.Tensor], *gradients: float) -> Update:
    """One micro-batch a gradient, then an update."""
    for gradient in gradients:
        engine.accumulate(engine.score(torch.tensor(gradient)))  # type: ignore[arg-type]
    return engine.update(1e-3)


def weights(engine: Engine[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.state()}


@pytest.mark.parametrize(("compute", "reduce", "stage"), TIERS)
def test_masters_and_moments_are_float32_and_compute_is_as_told(compute: str, reduce: str, stage: int) -> None:
    ours = engine(compute, reduce, stage)
    assert train(ours, 0.25).applied
    state = weights(ours)
    assert {name.split("/")[0] for name in state} >= {"master", "exp_avg", "exp_avg_sq"}
    assert {tensor.dtype for name, tensor in state.items() if name != "loss_scale"} == {torch.float32}
    weight = ours.module.get_parameter("weight").detach()
    assert weight.dtype == getattr(torch, compute)
    # A step of 1e-3 from 1 falls between two numbers of bfloat16: the master must have it all the same.
    assert float(state["master/weight"]) == pytest.approx(1 - 1e-3, abs=1e-6)
    assert float(weight) == float(state["master/weight"].to(weight.dtype))


@pytest.mark.parametrize(("compute", "reduce", "stage"), TIERS)
def test_gradients_are_summed_in_the_dtype_as_told(compute: str, reduce: str, stage: int) -> None:
    """Many small gradients on top of a large one: each is lost in a sum of bfloat16, none in one of float32."""
    ours = engine(compute, reduce, stage)
    assert ours._engine.communication_data_type == getattr(torch, reduce)
    norm = train(ours, 0.25, *[2**-12] * 64).grad_norm
    assert norm == pytest.approx(0.25 if reduce == "bfloat16" else 0.25 + 64 * 2**-12, rel=1e-5)


def test_float16_lowers_its_loss_scale_until_the_gradient_fits() -> None:
    ours, before = engine("float16"), 1.0
    refused = 0
    while not (update := train(ours, 16.0)).applied:
        refused += 1
        assert update.rescaled
        assert float(weights(ours)["master/weight"]) == before
    assert 0 < refused < 12
    assert update.grad_norm == pytest.approx(16.0)
    assert float(weights(ours)["master/weight"]) == pytest.approx(before - 1e-3, abs=1e-6)


def test_float16_keeps_gradients_that_are_too_small_for_it() -> None:
    small = 2.0**-20 * 2.0**-6
    assert torch.tensor(small).half() == 0
    ours = engine("float16")
    assert train(ours, small).grad_norm == pytest.approx(small, rel=1e-2)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_not_taken_for_the_loss_scales_fault(number: float) -> None:
    ours = engine("float16")
    train(ours, 1.0)
    update = train(ours, number)
    assert (update.applied, update.rescaled) == (False, False)
    assert train(ours, 1e6).rescaled, "and the next one is judged by itself"
    assert train(ours, 1.0).applied, "what was accumulated before is forgotten"


def test_at_the_lowest_loss_scale_nothing_is_its_fault_and_nothing_ends_the_process() -> None:
    ours = engine("float16")
    updates = [train(ours, 60000.0, 60000.0) for _ in range(3)]
    assert all(update.rescaled for update in updates)
    while ours._loss_scale is not None and ours._loss_scale.can_fall:
        spoil(ours)
    for _ in range(3):
        assert not spoil(ours).rescaled


def spoil(engine: Engine[torch.Tensor]) -> Update:
    """A finite loss with a gradient that is not: 0 * inf."""
    engine.accumulate((engine.score(torch.zeros(())) - 1).sqrt().nan_to_num())  # type: ignore[arg-type]
    return engine.update(1e-3)


def test_the_loss_scale_is_resumed() -> None:
    straight = engine("float16")
    for _ in range(6):
        train(straight, 8.0)
    resumed = engine("float16")
    resumed.restore(weights(straight), straight.optimizer_updates())
    for gradient in (8.0, 64.0, 64.0, 1.0):
        assert train(resumed, gradient) == train(straight, gradient)
    assert all(torch.equal(tensor, weights(straight)[name]) for name, tensor in weights(resumed).items())


def test_lowering_the_loss_scale_is_counted_and_is_no_sign_of_trouble(caplog: pytest.LogCaptureFixture) -> None:
    refusals, lowered = Refusals("policy"), Update(grad_norm=math.inf, applied=False, rescaled=True)
    with caplog.at_level(logging.WARNING):
        for step in range(2 * PATIENCE):
            refusals.note(step, lowered)
    assert refusals.total == 2 * PATIENCE
    assert not caplog.records
    refused = Update(grad_norm=math.inf, applied=False)
    for step in range(PATIENCE - 1):
        refusals.note(step, refused)
    with pytest.raises(NonFiniteTraining):
        refusals.note(9, refused)


def test_ppo_trains_in_float16_as_a_whole(model_folder: Path) -> None:
    run = run_file(
        model_folder, preset="ppo", lr=1e-3, kl_coef=0.1, kl_in="reward", compute_dtype="float16", zero_stage=1
    )  # fmt: skip
    trainer, roles = trainer_of(run)
    batch, before = random_groups(0), scores(roles, random_groups(0))
    metrics = [trainer.train(step, batch_of(batch)) for step in (1, 2)]
    assert sum(roles.updates()) + metrics[-1]["skipped_updates"] == 2 * 2 * 3
    assert sum(roles.updates()) >= 6
    assert not roles.actor.spoiled()
    assert not torch.equal(scores(roles, batch), before)


def test_a_machine_that_has_no_float16_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = type(deepspeed.accelerator.get_accelerator())
    monkeypatch.setattr(accelerator, "is_fp16_supported", lambda self: False)
    with pytest.raises(UsageError, match=r"learner\.compute_dtype is float16"):
        engine("float16")


def test_sums_in_another_narrow_dtype_are_refused() -> None:
    settings = LearnerSection(compute_dtype="float32", reduce_dtype="bfloat16")
    assert "learner.reduce_dtype" in next(settings.contradictions())
