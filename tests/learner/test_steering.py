"""A run that is resumed from an earlier checkpoint, or with other coefficients, with a real buffer."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.buffer.client import BufferClient
from forebay.buffer.reservoir import open_reservoir
from forebay.buffer.server import serving
from forebay.config.steering import Steering
from forebay.learner.errors import LearnerError
from forebay.learner.loop import run_learner
from forebay.learner.stop import Stop
from tests.learner.fake_buffer import FakeBuffer
from tests.learner.models import tiny_llama
from tests.learner.test_loop import batch_of, trainer_state
from tests.learner.test_loop import run_file as short_run
from tests.learner.test_with_buffer import Sampler, learn, run_file


def told(home: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / "learner" / "metrics.jsonl").read_text().splitlines()]


async def test_going_back_trains_the_same_batches_again_with_the_other_settings(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    run = run_file(tmp_path / "run", tmp_path / "model", max_staleness=1, steps=6)
    home = run.run.home
    async with serving(open_reservoir(run), listen="127.0.0.1:0") as server, asyncio.TaskGroup() as group:
        client = BufferClient(f"127.0.0.1:{server.port}")
        sampling = group.create_task(Sampler(client).work(run))
        assert await learn(run, server, 4) == 0
        later = home / "learner" / "checkpoints" / "step_000004"
        later.rename(later.with_name("aside_000004"))
        Steering().changed(2, {"learner.lr": 1e-3, "learner.kl_coef": 0.1}).write(home)
        assert await learn(run, server, None) == 0
        await asyncio.wait_for(sampling, 60)
        ledger = await client.ledger()
        await client.close()
    lines = told(home)
    assert [(line["step"], line["lr"]) for line in lines] == [
        *((step, 1e-2) for step in (1, 2, 3, 4)),
        *((step, 1e-3) for step in (3, 4, 5, 6)),
    ]
    assert [lines[4]["reward_mean"], lines[5]["reward_mean"]] == [lines[2]["reward_mean"], lines[3]["reward_mean"]]
    assert sum(row.groups for row in ledger.rows if row.state == "trained") == 6 * 3


def test_steps_before_the_change_are_trained_as_they_were(tmp_path: Path, model_folder: Path) -> None:
    """Interrupted and steered, or told everything beforehand: the same weights."""
    change = Steering().changed(2, {"learner.lr": 1e-4, "learner.kl_coef": 0.5, "learner.entropy_coef": 0.1})
    steered, run = FakeBuffer(batch_of), short_run(tmp_path / "a", model_folder)
    stop = Stop()
    steered.on_commit = lambda step: stop.ask("test") if step == 2 else None
    assert run_learner(run, steered, stop) == 0
    change.write(tmp_path / "a")
    assert run_learner(run, steered, Stop()) == 0

    change.write(tmp_path / "b")
    assert run_learner(short_run(tmp_path / "b", model_folder), FakeBuffer(batch_of), Stop()) == 0
    assert run_learner(short_run(tmp_path / "c", model_folder), FakeBuffer(batch_of), Stop()) == 0
    expected, ours, unsteered = (trainer_state(tmp_path / name, 4) for name in ("b", "a", "c"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())
    assert not all(torch.equal(ours[name], tensor) for name, tensor in unsteered.items())


@pytest.mark.parametrize("kind", ["settings", "checkpoint"])
def test_a_learner_that_runs_while_it_is_steered_starts_again(tmp_path: Path, model_folder: Path, kind: str) -> None:
    buffer, run = FakeBuffer(batch_of), short_run(tmp_path, model_folder, checkpoint_every_steps=1, keep_checkpoints=3)

    def steer(step: int) -> None:
        if step == 2 and kind == "settings":
            Steering().changed(2, {"learner.lr": 1e-4}).write(tmp_path)
        elif step == 3 and kind == "checkpoint":
            for name in ("step_000003", "step_000002"):
                folder = tmp_path / "learner" / "checkpoints" / name
                while not folder.exists():  # it is written behind training's back
                    time.sleep(0.01)
                folder.rename(folder.with_name(name.replace("step", "aside")))

    buffer.on_commit = steer
    with pytest.raises(LearnerError, match="start the learner again"):
        run_learner(run, buffer, Stop())
    assert buffer.committed == (2 if kind == "settings" else 3)
    buffer.on_commit = lambda step: None
    assert run_learner(run, buffer, Stop()) == 0
    assert buffer.leased == ([1, 2, 3, 3, 4] if kind == "settings" else [1, 2, 3, 4, 2, 3, 4])
