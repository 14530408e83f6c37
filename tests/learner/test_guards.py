"""A number that is not finite, put in at every stage of a real run: it is counted, and never published."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.buffer.answers import WHOLE
from forebay.buffer.client import Ended, Lease, Part, Waiting
from forebay.config.models import RunFile
from forebay.config.steering import Steering
from forebay.learner.engine import Engine, Update
from forebay.learner.errors import NonFiniteTraining
from forebay.learner.loop import run_learner
from forebay.learner.stop import Stop
from forebay.wire.experience import encode_frame
from forebay.wire.trajectory import Trajectory
from forebay.wire.weights import HostState
from tests.learner.fake_buffer import FakeBuffer
from tests.learner.models import random_groups

CRITIC: dict[str, object] = {"estimator": "gae"}


def run_file(home: Path, model: Path, **learner: object) -> RunFile:
    return RunFile.model_validate(
        {
            "run": {"name": "test", "folder": home},
            "model": {"path": str(model)},
            "task": {"name": "guess"},
            "learner": {
                "steps": 4, "lr": 1e-3, "compute_dtype": "float32", "zero_stage": 0, "checkpoint_every_steps": 1,
                "keep_checkpoints": 9, **learner,
            },
            "publish": {"dtype": "float32"},
        }
    )  # fmt: skip


def batch_of(step: int) -> list[Trajectory]:
    return random_groups(step)


def checkpoint_digest(home: Path, step: int) -> bytes:
    return HostState.from_safetensors(home / "learner" / "checkpoints" / f"step_{step:06d}").digest()


def checkpoints(home: Path) -> list[int]:
    found = (home / "learner" / "checkpoints").glob("step_*")
    return sorted(int(folder.name.removeprefix("step_")) for folder in found)


def assert_all_published_is_finite(buffer: FakeBuffer) -> None:
    """Also what came between first and last: each version is replayed on its own."""
    whole = buffer.published
    for count in range(1, len(whole) + 1):
        buffer.published = whole[:count]
        state = buffer.newest_weights()
        for slot in state.layout:
            assert np.isfinite(np.frombuffer(state.open_for_update(slot["name"]), np.float32)).all(), slot["name"]
    buffer.published = whole


class SpoiledBuffer(FakeBuffer):
    """Leases a group that cannot be trained in step 2, until that group is rejected."""

    def __init__(self, spoil: Callable[[Trajectory], Trajectory]) -> None:
        super().__init__(self._batch)
        self._spoil = spoil

    def _batch(self, step: int) -> list[Trajectory]:
        batch = batch_of(step)
        if step != 2 or self.rejected:
            return batch
        return [self._spoil(t) if t.group_id == batch[0].group_id else t for t in batch]


def with_logprob(number: float) -> Callable[[Trajectory], Trajectory]:
    def spoil(trajectory: Trajectory) -> Trajectory:
        logprobs = trajectory.logprobs.copy()
        logprobs[0] = number
        return replace(trajectory, logprobs=logprobs)

    return spoil


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_behaviour_log_probability_that_is_not_finite_has_its_group_rejected(
    tmp_path: Path, model_folder: Path, number: float
) -> None:
    buffer = SpoiledBuffer(with_logprob(number))
    assert run_learner(run_file(tmp_path, model_folder), buffer, Stop()) == 0
    assert [(step, len(groups)) for step, groups, _ in buffer.rejected] == [(2, 1)]
    assert "log-probabilities that are not finite" in buffer.rejected[0][2]
    assert [metrics["skipped_updates"] for _, _, metrics in buffer.commits] == [0, 0, 0, 0]
    assert_all_published_is_finite(buffer)


def huge(step: int, *, of: Callable[[int], bool]) -> list[Trajectory]:
    """Rewards beyond float32: the loss is not finite."""
    return [replace(t, reward=1e300 * t.reward) if of(step) else t for t in batch_of(step)]


def test_a_loss_that_is_not_finite_is_skipped_and_counted_and_the_run_goes_on(
    tmp_path: Path, model_folder: Path
) -> None:
    buffer = FakeBuffer(lambda step: huge(step, of=lambda step: step == 2))
    assert run_learner(run_file(tmp_path, model_folder, estimator="dr_grpo"), buffer, Stop()) == 0
    assert [metrics["skipped_updates"] for _, _, metrics in buffer.commits] == [0, 1, 1, 1]
    digests = [checkpoint_digest(tmp_path, step) for step in (1, 2, 3)]
    assert digests[0] == digests[1] != digests[2]
    assert_all_published_is_finite(buffer)


def test_the_count_of_skipped_updates_outlives_the_process(tmp_path: Path, model_folder: Path) -> None:
    buffer = FakeBuffer(lambda step: huge(step, of=lambda step: step in (1, 3)))
    stop = Stop()
    buffer.on_commit = lambda step: stop.ask("test") if step == 2 else None
    run = run_file(tmp_path, model_folder, estimator="dr_grpo")
    assert run_learner(run, buffer, stop) == 0
    assert run_learner(run, buffer, Stop()) == 0
    assert [metrics.get("skipped_updates") for _, _, metrics in buffer.commits if metrics] == [1, 1, 2, 2]


def test_losses_that_stay_not_finite_end_the_run_at_the_last_good_version(tmp_path: Path, model_folder: Path) -> None:
    buffer = FakeBuffer(lambda step: huge(step, of=lambda step: step > 1))
    with pytest.raises(NonFiniteTraining, match=r"policy's loss .* 3 times in a row"):
        run_learner(run_file(tmp_path, model_folder, estimator="dr_grpo"), buffer, Stop())
    assert checkpoints(tmp_path) == [1, 2, 3], "a step whose update is refused changes nothing and is a step"
    assert buffer.newest_weights().digest() == checkpoint_digest(tmp_path, 1)


def test_a_critics_loss_that_stays_not_finite_ends_the_run(tmp_path: Path, model_folder: Path) -> None:
    buffer = FakeBuffer(lambda step: huge(step, of=lambda step: step > 1))
    with pytest.raises(NonFiniteTraining, match=r"critic's loss .* 3 times in a row"):
        run_learner(run_file(tmp_path, model_folder, **CRITIC), buffer, Stop())
    assert_all_published_is_finite(buffer)


Fault = Callable[[Engine[Any]], None]


class Faults:
    """Does something to the actor's or the critic's engine before or after its n-th update, in every run."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, role: str, before: Mapping[int, Fault], after: Mapping[int, Fault]
    ):
        self._count = 0
        real = Engine.update

        def update(engine: Engine[Any], lr: float) -> Update:
            if type(engine.module).__name__ != role:
                return real(engine, lr)
            self._count += 1
            before.get(self._count, _nothing)(engine)
            done = real(engine, lr)
            after.get(self._count, _nothing)(engine)
            return done

        monkeypatch.setattr(Engine, "update", update)


def _nothing(engine: Engine[Any]) -> None:
    pass


@torch.no_grad()
def spoil_gradient(engine: Engine[Any]) -> None:
    *_, last = engine.module.parameters()
    assert last.grad is not None
    last.grad.view(-1)[0] = math.nan


@torch.no_grad()
def spoil_weight(engine: Engine[Any]) -> None:
    """One number of a row that no batch need ever look up."""
    first = next(engine.module.parameters())
    first.view(-1)[-1] = math.nan


@pytest.mark.parametrize("role", ["Policy", "ValueModel"])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    Faults(monkeypatch, role, before={2: spoil_gradient}, after={})
    buffer = FakeBuffer(batch_of)
    assert run_learner(run_file(tmp_path, model_folder, **CRITIC), buffer, Stop()) == 0
    assert [metrics["skipped_updates"] for _, _, metrics in buffer.commits] == [0, 1, 1, 1]
    assert_all_published_is_finite(buffer)


@pytest.mark.parametrize("role", ["Policy", "ValueModel"])
def test_a_weight_that_is_not_finite_is_neither_published_nor_saved(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    Faults(monkeypatch, role, before={}, after={3: spoil_weight})
    buffer = FakeBuffer(batch_of)
    with pytest.raises(NonFiniteTraining, match="weights are not finite after the step"):
        run_learner(run_file(tmp_path, model_folder, **CRITIC), buffer, Stop())
    assert (buffer.committed, checkpoints(tmp_path)) == (2, [1, 2])
    assert buffer.newest_weights().digest() == checkpoint_digest(tmp_path, 2)
    assert run_learner(run_file(tmp_path, model_folder, **CRITIC), buffer, Stop()) == 0, "a new process goes on"
    assert buffer.committed == 4


class TwoFleets(FakeBuffer):
    """Groups 0 and 1 are from fleet `near`, the others from fleet `far`."""

    def lease(self, step: int, wait_s: float, *, part: Part = WHOLE) -> Lease | Waiting | Ended:
        lease = super().lease(step, wait_s, part=part)
        assert isinstance(lease, Lease)
        parts = {"near": [0, 1], "far": [2, 3]}
        frames = [
            encode_frame(
                [t for t in self._batch_of(step) if t.group_id in groups], run="test", sampler=fleet, fleet=fleet,
                region="r", incarnation=1, sequence=step, attempts=dict.fromkeys(groups, 1),
            )
            for fleet, groups in parts.items()
        ]  # fmt: skip
        return replace(lease, frames=tuple(frames))


def far_away(step: int) -> list[Trajectory]:
    """From step 3 on, group 2 comes from weights that are nothing like the learner's."""
    return [
        replace(t, logprobs=np.where(t.loss_mask, -300, 0).astype(np.float32))
        if step > 2 and t.group_id == 2
        else t
        for t in batch_of(step)
    ]  # fmt: skip


def test_drift_pauses_before_it_is_published_and_names_fleet_version_and_task(
    tmp_path: Path, model_folder: Path
) -> None:
    buffer = TwoFleets(far_away)
    assert run_learner(run_file(tmp_path, model_folder), buffer, Stop()) == 1
    (reason,) = buffer.pauses
    assert reason.startswith("step 3: KL to the behaviour policy is ")
    assert "learner.max_kl is 10" in reason
    assert "fleet far, version 1.0, task guess" in reason
    assert "group 2 before all" in reason
    assert "forebay resume" in reason
    assert (buffer.committed, checkpoints(tmp_path)) == (2, [1, 2])
    assert buffer.newest_weights().digest() == checkpoint_digest(tmp_path, 2)


def test_updates_that_drift_are_not_published_either_and_name_the_same(tmp_path: Path, model_folder: Path) -> None:
    buffer = TwoFleets(batch_of)
    assert run_learner(run_file(tmp_path, model_folder, lr=0.5, max_kl=3.0), buffer, Stop()) == 1
    assert "after its updates" in buffer.pauses[0]
    assert "fleet near, version 1.0, task guess" in buffer.pauses[0]
    assert (buffer.versions, buffer.committed) == (["1.0 anchor"], 0)


def test_after_a_pause_the_run_goes_on_from_the_last_good_version(tmp_path: Path, model_folder: Path) -> None:
    buffer = TwoFleets(far_away)
    run = run_file(tmp_path, model_folder)
    assert run_learner(run, buffer, Stop()) == 1
    buffer._batch_of = batch_of
    assert run_learner(run, buffer, Stop()) == 0
    assert buffer.leased == [1, 2, 3, 3, 4]
    lines = (tmp_path / "learner" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_a_pause_that_the_same_batch_would_bring_again_ends_with_another_limit(
    tmp_path: Path, model_folder: Path
) -> None:
    buffer, run = TwoFleets(far_away), run_file(tmp_path, model_folder)
    assert [run_learner(run, buffer, Stop()) for _ in range(2)] == [1, 1]
    assert len(buffer.pauses) == 2
    Steering().changed(2, {"learner.max_kl": 1e300}).write(tmp_path)
    assert run_learner(run, buffer, Stop()) == 0
    assert buffer.committed == 4
