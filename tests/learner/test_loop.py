"""The learner's life against a buffer in memory: resume, faults, stops."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forebay.buffer.answers import WHOLE
from forebay.buffer.client import Ended, Lease, Part, Unreachable, Waiting
from forebay.config.models import RunFile
from forebay.errors import UsageError
from forebay.learner.checkpoint import CheckpointStore, Counters
from forebay.learner.errors import LearnerError, NonFiniteTraining
from forebay.learner.loop import run_learner
from forebay.learner.stop import Stop
from forebay.wire.trajectory import Trajectory
from forebay.wire.weights import HostState
from tests.learner.fake_buffer import FakeBuffer
from tests.learner.models import random_groups, tiny_llama


def run_file(home: Path, model: Path, **learner: object) -> RunFile:
    settings = {"steps": 4, "lr": 1e-3, "compute_dtype": "float32", "checkpoint_every_steps": 2, **learner}
    return RunFile.model_validate(
        {
            "run": {"name": "test", "folder": home},
            "model": {"path": str(model)},
            "task": {"name": "none"},
            "learner": settings,
        }
    )


def batch_of(step: int) -> list[Trajectory]:
    return random_groups(step)


def trainer_state(home: Path, step: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(home / "learner" / "checkpoints" / f"step_{step:06d}" / "trainer" / "state.safetensors")


def stopping_after(buffer: FakeBuffer, step: int) -> Stop:
    stop = Stop()
    buffer.on_commit = lambda done: stop.ask("test") if done == step else None
    return stop


def crash_after(buffer: FakeBuffer, step: int) -> Stop:
    """The process ends between the commit of `step` and anything later."""

    def die(done: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    buffer.on_commit = die
    return Stop()


def test_a_whole_run_publishes_commits_and_leaves_an_ordinary_checkpoint(tmp_path: Path, model_folder: Path) -> None:
    buffer = FakeBuffer(batch_of)
    assert run_learner(run_file(tmp_path, model_folder), buffer, Stop()) == 0
    assert buffer.leased == [1, 2, 3, 4]
    told = [(step, checkpoint) for step, checkpoint, _ in buffer.commits]
    assert [step for step, _ in told] == [1, 2, 3, 4]
    assert told[0] == (1, 0)
    assert told[-1] == (4, 4), "at the end everything is saved, and the buffer knows"
    assert buffer.versions[0] == "1.0 anchor"
    assert buffer.versions[-1] == "1.4"
    folder = tmp_path / "learner" / "checkpoints" / "step_000004"
    assert HostState.from_safetensors(folder).digest() == buffer.newest_weights().digest()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert "forebay" not in (folder / "config.json").read_text()
    lines = [json.loads(line) for line in (tmp_path / "learner" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {"reward_mean", "kl", "ratio_minus_1", "clip_fraction", "entropy", "grad_norm", "seconds"} <= lines[0].keys()
    assert buffer.left == ["done"]


@pytest.mark.parametrize(("dtype", "stage"), [("float32", 0), ("float32", 2), ("bfloat16", 1)])
@pytest.mark.parametrize("interrupt", [stopping_after, crash_after])
@pytest.mark.parametrize("at", [2, 3])
def test_resumed_weights_equal_the_uninterrupted_runs_bit_for_bit(
    tmp_path: Path,
    model_folder: Path,
    dtype: str,
    stage: int,
    interrupt: Callable[[FakeBuffer, int], Stop],
    at: int,
) -> None:
    settings = {"compute_dtype": dtype, "zero_stage": stage, "epochs": 2, "minibatches": 2}
    straight = FakeBuffer(batch_of)
    run_learner(run_file(tmp_path / "a", model_folder, **settings), straight, Stop())

    broken, run = FakeBuffer(batch_of), run_file(tmp_path / "b", model_folder, **settings)
    try:
        assert run_learner(run, broken, interrupt(broken, at)) == 0
    except KeyboardInterrupt:
        assert interrupt is crash_after
    broken.on_commit = lambda step: None
    assert run_learner(run, broken, Stop()) == 0

    expected, ours = trainer_state(tmp_path / "a", 4), trainer_state(tmp_path / "b", 4)
    assert expected.keys() == ours.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name
    assert broken.newest_weights().digest() == straight.newest_weights().digest()


def test_killed_between_checkpoint_and_commit_the_step_is_not_trained_again(tmp_path: Path, model_folder: Path) -> None:
    buffer, run = FakeBuffer(batch_of), run_file(tmp_path, model_folder)
    real_commit = buffer.commit

    def dying_commit(step: int, checkpoint_step: int, metrics: object, attempt: int = 0) -> None:
        if step == 2:
            raise KeyboardInterrupt
        real_commit(step, checkpoint_step, metrics)  # type: ignore[arg-type]

    buffer.commit = dying_commit  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run_learner(run, buffer, Stop())
    buffer.commit = real_commit  # type: ignore[method-assign]
    assert run_learner(run, buffer, Stop()) == 0
    assert buffer.leased == [1, 2, 3, 4]
    assert "2.2" in buffer.versions, "the resumed version is published under the new incarnation, as a delta of nothing"


def test_drift_beyond_max_kl_pauses_before_anything_is_published(tmp_path: Path, model_folder: Path) -> None:
    def drifting(step: int) -> list[Trajectory]:
        batch = batch_of(step)
        if step < 3:
            return batch
        return [replace(t, logprobs=np.where(t.loss_mask, -30, 0).astype(np.float32)) for t in batch]

    buffer = FakeBuffer(drifting)
    assert run_learner(run_file(tmp_path, model_folder), buffer, Stop()) == 1
    assert len(buffer.pauses) == 1
    assert "max_kl is 10" in buffer.pauses[0]
    assert buffer.committed == 2
    assert buffer.versions[-1] == "1.2"
    assert HostState.from_safetensors(tmp_path / "learner" / "checkpoints" / "step_000002").digest() == (
        buffer.newest_weights().digest()
    )


def test_updates_that_stay_not_finite_end_the_run_and_the_buffer_is_told(tmp_path: Path, model_folder: Path) -> None:
    buffer = FakeBuffer(lambda step: [replace(t, reward=1e300 * t.reward) for t in batch_of(step)])
    with pytest.raises(NonFiniteTraining, match="3 times in a row"):
        run_learner(run_file(tmp_path, model_folder, estimator="dr_grpo"), buffer, Stop())
    assert buffer.committed == 2
    assert buffer.left
    assert buffer.newest_weights().digest() == buffer.first_digest()


def test_weights_that_answer_nan_are_never_published(tmp_path: Path, model_folder: Path) -> None:
    buffer = FakeBuffer(batch_of)
    run = run_file(tmp_path, model_folder, lr=1e38, max_grad_norm=1e30, max_kl=1e30)
    with pytest.raises(NonFiniteTraining, match="not published"):
        run_learner(run, buffer, Stop())
    assert (buffer.versions, buffer.committed) == (["1.0 anchor"], 0)


def test_an_update_that_goes_beyond_max_kl_is_not_published(tmp_path: Path, model_folder: Path) -> None:
    buffer = FakeBuffer(batch_of)
    assert run_learner(run_file(tmp_path, model_folder, lr=0.5, max_kl=3.0), buffer, Stop()) == 1
    assert "after its updates" in buffer.pauses[0]
    assert (buffer.versions, buffer.committed) == (["1.0 anchor"], 0)


def test_the_buffer_may_be_slow_to_store_without_stopping_training(tmp_path: Path, model_folder: Path) -> None:
    buffer = FakeBuffer(batch_of)
    buffer.on_commit = lambda step: buffer.gate.clear() if step == 1 else buffer.gate.set() if step == 3 else None
    assert run_learner(run_file(tmp_path, model_folder), buffer, Stop()) == 0
    assert buffer.versions[-1].startswith("1.4")


def test_groups_without_any_signal_change_nothing(tmp_path: Path, model_folder: Path) -> None:
    buffer = FakeBuffer(lambda step: [replace(t, reward=1.0) for t in batch_of(step)])
    assert run_learner(run_file(tmp_path, model_folder, steps=2), buffer, Stop()) == 0
    state = trainer_state(tmp_path, 2)
    for name, parameter in tiny_llama().named_parameters():
        assert torch.equal(state[f"master/model.{name}"], parameter)


def test_a_missing_model_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.path") as caught:
        run_learner(run_file(tmp_path, tmp_path / "nowhere"), FakeBuffer(batch_of), Stop())
    assert "\n" not in str(caught.value)


def test_a_half_written_checkpoint_is_never_resumed_and_the_newest_is_never_deleted(
    tmp_path: Path, model_folder: Path
) -> None:
    buffer, run = FakeBuffer(batch_of), run_file(tmp_path, model_folder, checkpoint_every_steps=1, keep_checkpoints=1)
    checkpoints = tmp_path / "learner" / "checkpoints"
    (checkpoints / ".writing-step_000009").mkdir(parents=True)
    (checkpoints / "step_000009" / "trainer").mkdir(parents=True)
    assert run_learner(run, buffer, Stop()) == 0
    assert buffer.leased == [1, 2, 3, 4]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_000004", "step_000009"]


class SpoilingBuffer(FakeBuffer):
    """Gives out a batch with a group that cannot be trained, until that group is rejected."""

    def __init__(self, spoil: Callable[[Trajectory], Trajectory], group_id: int) -> None:
        super().__init__(batch_of)
        self._spoil, self._group_id = spoil, group_id

    def lease(self, step: int, wait_s: float, *, part: Part = WHOLE) -> Lease | Waiting | Ended:
        self._batch_of = batch_of if self.rejected else self._spoiled
        return super().lease(step, wait_s, part=part)

    def _spoiled(self, step: int) -> list[Trajectory]:
        return [self._spoil(t) if t.group_id == self._group_id else t for t in batch_of(step)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_with_a_reward_that_is_not_finite_is_rejected_and_the_run_goes_on(
    tmp_path: Path, model_folder: Path, bad: float
) -> None:
    group_id = batch_of(1)[0].group_id
    buffer = SpoilingBuffer(lambda trajectory: replace(trajectory, reward=bad), group_id)
    assert run_learner(run_file(tmp_path, model_folder), buffer, Stop()) == 0
    assert [(step, groups) for step, groups, _ in buffer.rejected] == [(1, (group_id,))]
    assert "not finite" in buffer.rejected[0][2]
    assert buffer.leased == [1, 1, 2, 3, 4]


def test_groups_of_a_frame_that_does_not_open_are_rejected(tmp_path: Path, model_folder: Path) -> None:
    class Damaging(FakeBuffer):
        def lease(self, step: int, wait_s: float, *, part: Part = WHOLE) -> Lease | Waiting | Ended:
            lease = super().lease(step, wait_s, part=part)
            assert isinstance(lease, Lease)
            if not self.rejected:
                lease.frames[0].payload = lease.frames[0].payload[:-1] + b"?"
            return lease

    buffer = Damaging(batch_of)
    assert run_learner(run_file(tmp_path, model_folder), buffer, Stop()) == 0
    assert len(buffer.rejected) == 1
    assert "checksum" in buffer.rejected[0][2]
    assert [step for step, _, _ in buffer.commits] == [1, 2, 3, 4]


def test_when_the_data_ends_the_last_weights_are_published_and_saved(tmp_path: Path, model_folder: Path) -> None:
    buffer = FakeBuffer(batch_of)
    buffer.ends_after = 3
    run = run_file(tmp_path, model_folder)
    run = run.model_copy(update={"publish": run.publish.model_copy(update={"every_steps": 2})})
    assert run_learner(run, buffer, Stop()) == 0
    assert buffer.commits[-1][:2] == (3, 3)
    assert buffer.versions[-1] == "1.3"
    folder = tmp_path / "learner" / "checkpoints" / "step_000003"
    assert HostState.from_safetensors(folder).digest() == buffer.newest_weights().digest()


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, save = threading.Event(), CheckpointStore.save

    def slow_save(store: CheckpointStore, counters: Counters, *rest: Any) -> Path:
        assert disk.wait(30)
        return save(store, counters, *rest)

    monkeypatch.setattr(CheckpointStore, "save", slow_save)
    buffer = FakeBuffer(batch_of)
    buffer.on_commit = lambda step: disk.set() if step == 3 else None
    assert run_learner(run_file(tmp_path, model_folder), buffer, Stop()) == 0
    told = [(step, checkpoint) for step, checkpoint, _ in buffer.commits]
    assert told[:3] == [(1, 0), (2, 0), (3, 0)], "the buffer is told of a checkpoint when it is on the disk"
    assert told[-1] == (4, 4)


def test_a_checkpoint_that_cannot_be_written_ends_the_run(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "save", full)
    buffer = FakeBuffer(batch_of)
    with pytest.raises(LearnerError, match=r"could not be written.*No space left"):
        run_learner(run_file(tmp_path, model_folder), buffer, Stop())
    assert {checkpoint for _, checkpoint, _ in buffer.commits} == {0}


def test_told_to_stop_while_the_buffer_is_away_it_saves_and_goes(tmp_path: Path, model_folder: Path) -> None:
    class Away(FakeBuffer):
        """Gone for good from the moment that somebody asks the learner to stop."""

        def lease(self, step: int, wait_s: float, *, part: Part = WHOLE) -> Lease | Waiting | Ended:
            if step == 4:
                stop.ask("test")
            self._answer()
            return super().lease(step, wait_s, part=part)

        def commit(self, step: int, checkpoint_step: int, metrics: Mapping[str, Any], attempt: int = 0) -> None:
            self._answer()
            super().commit(step, checkpoint_step, metrics, attempt)

        def leave(self, reason: str) -> None:
            self._answer()

        def _answer(self) -> None:
            if stop.asked:
                raise Unreachable("away for 10 s")

    stop, run = Stop(), run_file(tmp_path, model_folder)
    away = Away(batch_of)
    assert run_learner(run, away, stop) == 0
    assert away.committed == 3
    assert away.checkpoint <= 2, "the buffer does not know that step 3 is saved"
    assert (tmp_path / "learner" / "checkpoints" / "step_000003").is_dir()
