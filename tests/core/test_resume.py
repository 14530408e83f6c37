"""`forebay resume --from --set` against a real buffer: what it leaves for the learner, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from forebay.buffer.client import BufferClient
from forebay.buffer.reservoir import open_reservoir
from forebay.buffer.server import serving
from forebay.cli.main import main
from forebay.config.load import load
from forebay.config.steering import Change, Steering

RUN = """
[run]
name = "t"
folder = "{folder}"
[model]
path = "m"
[task]
name = "none"
[buffer]
listen = "{address}"
[learner]
max_staleness = 0
kl_coef = 0.2
"""


def run_file(tmp_path: Path, address: str, checkpoints: Sequence[int]) -> Path:
    """A run file, and checkpoints of these steps in its folder."""
    path, home = tmp_path / "run.toml", tmp_path / "run"
    path.write_text(RUN.format(folder=home, address=address))
    (home / "learner" / "checkpoints").mkdir(parents=True, exist_ok=True)
    for step in checkpoints:
        trainer = home / "learner" / "checkpoints" / f"step_{step:06d}" / "trainer"
        trainer.mkdir(parents=True)
        (trainer / "state.json").write_text("{}")
    return path


async def resume(tmp_path: Path, checkpoints: Sequence[int], *words: str) -> tuple[int, str]:
    """Exit code of `forebay resume` on a paused run, and whether it is still paused."""
    first = load([run_file(tmp_path, "127.0.0.1:1", checkpoints)], {})
    async with serving(open_reservoir(first), listen="127.0.0.1:0") as server:
        address = f"127.0.0.1:{server.port}"
        path = run_file(tmp_path, address, [])
        async with BufferClient(address) as client:
            await client.pause("drift")
            code = await asyncio.to_thread(main, ["resume", str(path), *words])
            return code, (await client.status()).state


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run" / "learner" / "checkpoints").iterdir())


async def test_resuming_as_before_changes_nothing(tmp_path: Path) -> None:
    assert await resume(tmp_path, [10, 20]) == (0, "running")
    assert Steering.read(tmp_path / "run") == Steering()
    assert folders(tmp_path) == ["step_000010", "step_000020"]


async def test_settings_hold_from_the_newest_checkpoint_on(tmp_path: Path) -> None:
    code, state = await resume(tmp_path, [10, 20], "--set", "learner.kl_coef=0.5", "--set=learner.critic.lr=1e-4")
    assert (code, state) == (0, "running")
    settings = {"learner.kl_coef": 0.5, "learner.critic.lr": 1e-4}
    assert Steering.read(tmp_path / "run") == Steering(changes=(Change(after=20, settings=settings),))


@pytest.mark.parametrize("named", ["10", "step_000010", "runs/t/learner/checkpoints/step_000010/"])
async def test_an_earlier_checkpoint_sets_later_ones_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    (tmp_path / "run" / "learner" / "checkpoints" / "aside_000020" / "trainer").mkdir(parents=True)  # from another time
    assert await resume(tmp_path, [10, 20], "--from", named) == (0, "running")
    assert folders(tmp_path) == ["aside_000020", "step_000010"]
    assert "the learner goes on from step 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--from", "15"], "expected one of 10, 20"),
        (["--from", "0"], "expected one of 10, 20"),
        (["--set", "learner.kl_coef"], "expected KEY=VALUE"),
        (["--set", "learner.kl_coeff=1"], "did you mean learner.kl_coef"),
        (["--set", "learner.kl_coef=-1"], "--set learner.kl_coef: learner.kl_coef is -1; expected a number of at "),
        (["--set", "learner.group_size=4"], "fixed when the run began; expected one of learner.clip_high"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_and_the_run_stays_paused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert await resume(tmp_path, [10, 20], *words) == (2, "paused")
    assert told in capsys.readouterr().err
    assert folders(tmp_path) == ["step_000010", "step_000020"]
    assert Steering.read(tmp_path / "run") == Steering()


async def test_before_the_first_checkpoints_the_run_can_begin_anew(tmp_path: Path) -> None:
    assert await resume(tmp_path, [], "--set", "learner.lr=1e-7") == (0, "running")
    assert Steering.read(tmp_path / "run").changes[0].after == 0


def test_going_back_forgets_what_was_changed_later(tmp_path: Path) -> None:
    steering = Steering().changed(10, {"learner.lr": 1e-7}).changed(20, {"learner.lr": 1e-8})
    run = load([run_file(tmp_path, "127.0.0.1:1", [])], {})
    assert [steering.at(run, step).learner.lr for step in (10, 11, 20, 21)] == [1e-6, 1e-7, 1e-7, 1e-8]
    back = steering.changed(10, {"learner.kl_coef": 0.3})
    assert back.changes == (Change(after=10, settings={"learner.lr": 1e-7, "learner.kl_coef": 0.3}),)
    assert (back.at(run, 30).learner.lr, back.at(run, 30).learner.kl_coef) == (1e-7, 0.3)
    back.write(tmp_path)
    assert Steering.read(tmp_path) == back
