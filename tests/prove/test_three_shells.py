"""The quickstart as three shells: samplers join later, each service is killed with -9 once, and it learns the same.

Minutes long, so not part of `make test`: `make prove`. Prints what it saw as JSON, last.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.buffer.client import BufferClient
from forebay.buffer.conservation import balanced, ledger_of
from forebay.wire.v1 import control_pb2
from tests.end_to_end.shells import ROOT, Shells, Watch

DEADLINE_S = 300.0

pytestmark = [pytest.mark.prove, pytest.mark.timeout(2400)]


async def test_three_shells(tmp_path: Path) -> None:
    started_s, watch = time.monotonic(), Watch()
    # Long enough that two more engines start, and three services come back, while it lasts.
    flags = [f"--model.path={tmp_path / 'model'}", "--learner.steps=200", "--observe.eval_every_steps=50"]
    with Shells(tmp_path, ROOT / "examples/quickstart.toml", flags) as shells:
        shells.start("buffer", "buffer")
        shells.start("learner", "learner")
        shells.start("first", "sampler", "--id=first")
        await shells.until(lambda status: status.step >= 5, watch, DEADLINE_S)
        for name in ("second", "third"):
            shells.start(name, "sampler", f"--id={name}")
        await shells.until(_all_produce, watch, DEADLINE_S)
        for name, command in (("learner", "learner"), ("buffer", "buffer"), ("first", "sampler")):
            step = watch.steps[-1]
            shells.kill(name)
            shells.start(name, command, *(["--id=first"] if name == "first" else []))
            await shells.until(lambda status, step=step: status.step > step, watch, DEADLINE_S)
        status = await shells.until(lambda status: status.state == "finished", watch, DEADLINE_S)
        async with BufferClient(shells.address) as client:
            history = await client.history()
        for name in ("learner", "first", "second", "third"):
            assert await asyncio.to_thread(shells.processes[name].wait, 120) == 0, shells.log(name)[-2000:]
        shells.processes["buffer"].terminate()
        assert await asyncio.to_thread(shells.processes["buffer"].wait, 60) == 0, shells.log("buffer")[-2000:]
        ledger = ledger_of(shells.home / "buffer" / "journal")
    shown = _shown(status, history, watch, time.monotonic() - started_s) | {"ledger_balanced": balanced(ledger)}
    print(json.dumps(shown))
    assert shown["ledger_balanced"]
    assert shown["steps_trained"] == status.steps
    assert shown["score_before"] <= 0.5
    assert shown["score_after"] >= 0.9


def _all_produce(status: control_pb2.StatusResponse) -> bool:
    return sum(member.groups > 0 for member in status.members if member.member.id in ("first", "second", "third")) == 3


def _shown(
    status: control_pb2.StatusResponse, history: control_pb2.HistoryResponse, watch: Watch, seconds: float
) -> dict[str, Any]:
    return {
        "seconds": round(seconds),
        "score_before": history.evals[0].score,
        "score_after": history.evals[-1].score,
        "stderr_after": history.evals[-1].stderr,
        "steps_trained": len({record.step for record in history.steps}),
        "samplers": {m.member.id: m.groups for m in status.members if m.member.id in watch.samplers},
        "versions_seen_installed": len(watch.installed),
    }
