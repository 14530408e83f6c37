"""`forebay learner` on two ranks against a real buffer: a rank is killed, all are told to stop, one rank goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.buffer.client import BufferClient
from forebay.buffer.reservoir import open_reservoir
from forebay.buffer.server import BufferServer, serving
from forebay.config.load import load
from forebay.config.models import RunFile
from tests.learner.models import tiny_llama
from tests.learner.run_texts import run_text
from tests.learner.test_with_buffer import Sampler

ROOT = Path(__file__).resolve().parents[2]
STEPS, GROUPS = 12, 3
LEARNER = f"""
steps = {STEPS}
groups_per_step = {GROUPS}
group_size = 4
max_staleness = 0
lr = 1e-2
checkpoint_every_steps = 2
"""

pytestmark = pytest.mark.timeout(300)


class Learner:
    """A `forebay learner` process, its output in a file."""

    def __init__(self, folder: Path, server: BufferServer, *flags: str) -> None:
        self._server, self._log = server, folder / "learner.log"
        words = [str(folder / "run.toml"), f"--learner.connect=127.0.0.1:{server.port}", *flags]
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "forebay.cli.main", "learner", *words]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    async def committed(self, step: int) -> None:
        """Wait until the buffer has the step."""
        async with asyncio.timeout(120):
            while self._server.reservoirs[0].state.committed < step:
                assert self.process.poll() is None, self.log
                await asyncio.sleep(0.05)  # another process works: there is nothing to be notified by

    async def ended(self) -> int:
        """Its exit code."""
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), 120)

    def rank(self, number: int) -> int:
        """Process id of a rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (found,) = [pid for pid in children if f"RANK={number}".encode() in _environment(pid)]
        return int(found)

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")


def _environment(pid: str) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


async def test_ranks_die_stop_and_go_on_as_one_learner(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    (tmp_path / "run.toml").write_text(run_text(tmp_path / "model", LEARNER, folder=tmp_path / "run"))
    run = load([tmp_path / "run.toml"], {})
    async with serving(open_reservoir(run), listen="127.0.0.1:0") as server:
        client = BufferClient(f"127.0.0.1:{server.port}")
        sampling = asyncio.create_task(Sampler(client).work(run))
        await _a_rank_dies(tmp_path, server)
        await _all_stop(tmp_path, server)
        alone = Learner(tmp_path, server, "--learner.zero_stage=0")
        assert await alone.ended() == 0, alone.log
        await asyncio.wait_for(sampling, 30)
        ledger = await client.ledger()
        await client.close()
    assert sum(row.groups for row in ledger.rows if row.state == "trained") == STEPS * GROUPS
    _check_steps(run)


async def _a_rank_dies(folder: Path, server: BufferServer) -> None:
    """Then the other one ends too, and says so in a line of its own at most."""
    two = Learner(folder, server, "--learner.ranks=2", "--learner.zero_stage=3")
    await two.committed(3)
    other = two.rank(0)
    os.kill(two.rank(1), signal.SIGKILL)
    assert await two.ended() == 128 + signal.SIGKILL
    with pytest.raises(ProcessLookupError):  # no rank outlives another
        os.kill(other, 0)
    assert "Traceback" not in two.log


async def _all_stop(folder: Path, server: BufferServer) -> None:
    """On SIGTERM, after the step, with a checkpoint."""
    two = Learner(folder, server, "--learner.ranks=2", "--learner.zero_stage=2")
    await two.committed(6)
    two.process.terminate()
    assert await two.ended() == 0, two.log
    assert "stopping after step" in two.log
    state = server.reservoirs[0].state
    assert state.checkpoint == state.committed, "what was trained is saved"


def _check_steps(run: RunFile) -> None:
    """Staleness 0: whoever trained, samplers had exactly its weights."""
    lines = [json.loads(line) for line in (run.run.home / "learner" / "metrics.jsonl").read_text().splitlines()]
    assert sorted({line["step"] for line in lines}) == list(range(1, STEPS + 1))
    assert {line["staleness_max"] for line in lines} == {0}
    assert max(line["ratio_minus_1"] for line in lines) < 2e-5
