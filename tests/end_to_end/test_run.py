"""`forebay run` with everything real, each of its services killed with -9 on the way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from forebay.buffer.conservation import balanced, ledger_of
from tests.end_to_end.shells import ROOT, Shells, Watch

DEADLINE_S = 500.0

pytestmark = [pytest.mark.engine, pytest.mark.end_to_end, pytest.mark.timeout(600)]


async def test_killed_services_come_back_and_the_run_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    watch = Watch()
    model = f"--model.path={tmp_path / 'model'}"
    with Shells(tmp_path, ROOT / "tests/end_to_end/digits.toml", [model]) as shells:
        shells.start("run", "run")
        await _appears(shells)
        for step, commands in ((2, ("learner", "sampler")), (5, ("buffer",))):
            await shells.until(lambda status, step=step: status.step >= step, watch, DEADLINE_S)
            for pid in [pid for command in commands for pid in shells.children(command)]:
                os.kill(pid, signal.SIGKILL)
        code = await asyncio.wait_for(asyncio.to_thread(shells.processes["run"].wait), DEADLINE_S)
        assert code == 0, shells.log("run")[-3000:]
        log = shells.log("run")

    for command in ("learner", "sampler-0", "buffer"):
        assert f"{command} died: killed by SIGKILL" in log or f"{command}: killed by SIGKILL" in log, log
    ledger = ledger_of(shells.home / "buffer" / "journal")
    assert balanced(ledger)
    trained = sum(row.groups for row in ledger.rows if row.state == "trained")
    assert trained == 9 * 8, "every step trains its groups once, whoever died"
    _check_history(shells.home)
    _check_checkpoint(shells.home / "learner" / "checkpoints" / "step_000009")
    assert watch.installed, "no sampler was seen with the newest weights"


async def _appears(shells: Shells) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not shells.children("buffer"):
            assert shells.processes["run"].poll() is None, shells.log("run")
            await asyncio.sleep(0.2)  # another process starts: there is nothing to be notified by


def _check_history(home: Path) -> None:
    summary = json.loads((home / "summary.json").read_text())
    assert summary["ledger_balanced"] is True
    assert (home / "plot.png").stat().st_size > 10_000
    steps = [json.loads(line)["step"] for line in (home / "learner" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 10))


def _check_checkpoint(folder: Path) -> None:
    """It is an ordinary one: transformers loads it, and safetensors alone reads it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() > 900_000
    assert AutoTokenizer.from_pretrained(folder)("1=").input_ids
    assert all("lm_head" not in name for name in load_file(folder / "model.safetensors"))
