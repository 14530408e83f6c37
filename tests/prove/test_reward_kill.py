"""`forebay run` with everything real and a reward model beside the rule; the model's service is killed on the way."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from forebay.buffer.conservation import balanced, ledger_of
from forebay.buffer.recording import read_recording
from forebay.buffer.replay import Steps, export
from tests.end_to_end.shells import ROOT, Shells, Watch, free_ports

DEADLINE_S = 300.0
STEPS = 4

pytestmark = [pytest.mark.prove, pytest.mark.timeout(400)]


async def test_a_run_with_a_reward_model_that_is_killed_on_the_way(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    settings = {
        "model.path": tmp_path / "model",
        "learner.steps": STEPS,
        "reward.rule_weight": 2.0,
        "reward.models.m.path": tmp_path / "reward",
        "reward.models.m.make": "tests.reward.models:make",
        "reward.models.m.address": f"127.0.0.1:{port}",
        "reward.models.m.weight": 0.25,
    }
    watch = Watch()
    with Shells(
        tmp_path, ROOT / "tests/end_to_end/digits.toml", [f"--{key}={value}" for key, value in settings.items()]
    ) as shells:
        shells.start("run", "run")
        await _appears(shells)
        await shells.until(lambda status: status.step >= 1, watch, DEADLINE_S)
        (pid,) = shells.children("reward")
        os.kill(pid, signal.SIGKILL)
        code = await asyncio.wait_for(asyncio.to_thread(shells.processes["run"].wait), DEADLINE_S)
        log = shells.log("run")
    assert code == 0, log[-3000:]
    assert "reward-m died: killed by SIGKILL" in log
    ledger = ledger_of(shells.home / "buffer" / "journal")
    assert balanced(ledger)
    assert not [row for row in ledger.rows if "reward_failed" in row.state], "the successor came within the patience"
    rows = _trajectories(shells.home, tmp_path / "rows.parquet")
    assert len(rows) >= STEPS * 8 * 4
    for row in rows:
        parts = dict(row["reward_parts"])
        assert parts.keys() == {"digits", "rule", "model.m"}
        assert row["reward"] == pytest.approx(2.0 * parts["rule"] + 0.25 * parts["model.m"], rel=1e-6)
    assert len({dict(row["reward_parts"])["model.m"] for row in rows}) > 10


async def _appears(shells: Shells) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not shells.children("buffer"):
            assert shells.processes["run"].poll() is None, shells.log("run")
            await asyncio.sleep(0.2)  # another process starts: there is nothing to be notified by


def _trajectories(home: Path, target: Path) -> list[dict[str, Any]]:
    found = export(read_recording(home), target, Steps(first=1, last=STEPS))
    assert not found.unreadable
    rows: list[dict[str, Any]] = pq.read_table(target, columns=["reward", "reward_parts"]).to_pylist()
    return rows
