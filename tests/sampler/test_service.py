"""The `forebay sampler` process: from joining to leaving, and what is left of it when it is killed."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forebay.buffer.client import Lease
from forebay.config.models import RunFile
from forebay.config.toml_text import toml_text
from forebay.wire.experience import decode_frame
from forebay.wire.weights import HostState
from tests.sampler.support import DEADLINE_S, Learner, base_state, buffer_with_learner, nudged, soon

START_DEADLINE_S = 240.0  #: an engine's start on a machine that has other things to do

pytestmark = [pytest.mark.engine, pytest.mark.end_to_end]


@asynccontextmanager
async def sampler_process(run: RunFile, address: str, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """`forebay sampler` on a run file of its own; killed if the test leaves it running."""
    settings = run.model_dump(mode="json", exclude_none=True)
    settings["sampler"]["connect"] = address
    settings["run"]["folder"] = str(folder / "run")
    file = folder / "run.toml"
    file.write_text(toml_text(settings))
    with (folder / "sampler.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "forebay.cli.main", "sampler", str(file), stderr=log
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def descendants(pid: int) -> set[int]:
    """Every process below `pid`."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, open_ = set[int](), {pid}
    while open_:
        open_ = {child for child, parent in parents.items() if parent in open_} - found
        found |= open_
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def run(run_file: RunFile, tmp_path: Path) -> RunFile:
    settings = run_file.model_dump()
    settings["run"]["folder"] = tmp_path / "buffer-side"
    settings["task"]["heldout_prompts"] = 8
    settings["learner"] |= {"steps": 2, "max_staleness": 0}
    return RunFile.model_validate(settings)


async def _lease(learner: Learner, step: int) -> Lease:
    while True:
        answer = await learner.client.lease(step, 20.0)
        if isinstance(answer, Lease):
            return answer


async def _train(learner: Learner, step: int, state: HostState, *, last: bool) -> HostState:
    """What a learner does in a step, but for learning."""
    async with asyncio.timeout(START_DEADLINE_S):
        batch = await _lease(learner, step)
    trajectories = [t for frame in batch.frames for t in decode_frame(frame)]
    assert {t.oldest for t in trajectories} == {t.newest for t in trajectories} == {learner.version}
    await learner.client.commit(step, step if last else 0, {})
    state = nudged(state, step)
    await learner.publish(step, state)
    return state


@pytest.mark.timeout(600)
async def test_killed_sampler_leaves_no_process(run: RunFile, checkpoint: Path, tmp_path: Path) -> None:
    """Joins, proves the checkpoint, evaluates, generates; killed. (tests/end_to_end has its successor.)"""
    async with buffer_with_learner(run) as (server, learner):
        state = base_state(checkpoint)
        await learner.publish(0, state)
        async with sampler_process(run, server.address, tmp_path) as process:
            await _train(learner, 1, state, last=False)
            children = descendants(process.pid)
            assert len(children) >= 3  # vLLM's engine and its worker, and what scores
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await soon(lambda: not any(map(alive, children)))
        status = await learner.client.status()
        assert [result.version.step for result in status.evals] == [0]
        assert "Traceback" not in (tmp_path / "sampler.log").read_text()


@pytest.mark.timeout(300)
async def test_sigterm_while_starting_leaves_in_order(run: RunFile, tmp_path: Path) -> None:
    async with buffer_with_learner(run) as (server, learner), sampler_process(run, server.address, tmp_path) as process:
        log = tmp_path / "sampler.log"
        await soon(lambda: log.exists() and "joined run" in log.read_text())
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0
        await soon(lambda: not any(map(alive, children)))
        assert await _states(learner) == ["left"]


async def _states(learner: Learner) -> list[str]:
    """Of the sampler, if it ever joined."""
    return [member.state for member in (await learner.client.status()).members if member.member.id == "s0"]
