"""The buffer's benchmark counts what it says it counts, and what fails is told."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import buffer
from benchmarks.buffer_load import peers
from benchmarks.buffer_load.learner import arrived_in
from benchmarks.buffer_load.plan import QUICK, Plan
from benchmarks.buffer_load.soak import slope
from forebay.buffer.client import Lease
from forebay.wire.frame_header import checksum
from forebay.wire.v1 import experience_pb2

TINY = Plan(
    rounds=1,
    rows_1k=1000,
    frame_kib=(64,),
    rows_64k_mb=8,
    rows_1m_mb=8,
    single_appends=20,
    cycles=10,
    backlog_rows=1000,
    backlog_steps=2,
    streams=8,
    stream_frames=3,
    recovery_mb=1,
    peer_s=0.1,
)


def test_a_tiny_run_has_the_keys_and_loses_no_row(tmp_path: Path) -> None:
    found = json.loads(json.dumps(buffer.measure(TINY, tmp_path, ["streams", "single"])))
    assert "error" not in found
    assert found["streams"] == 8
    assert found["streams_rows_sent"] == found["streams_rows_in_ledger"] == 8 * 3 * 8
    for key in ("single_append_s", "single_append_p50_ms", "single_append_p99_ms", "cycle_p50_ms", "cycle_p99_ms"):
        assert found[key] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_cannot_be_installed_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(name: str, requirements: Path) -> Path:
        raise subprocess.CalledProcessError(1, ["pip", "install"], stderr="ERROR: No matching distribution\n")

    monkeypatch.setattr(peers, "_environment", fail)
    found = buffer.measure(TINY, tmp_path, ["reverb"])
    assert found["error"] == (
        "reverb: reverb could not be measured: pip install ended with 1: ERROR: No matching distribution"
    )
    assert found["vs_reverb_append"] is None


def test_a_section_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(plan: Plan, folder: Path) -> dict[str, Any]:
        raise RuntimeError("out of luck")

    def whole(plan: Plan, folder: Path) -> dict[str, Any]:
        return {"append_1k_rows_s": 300}

    sections = {"broken": broken, "rows_1k": whole, "reverb": lambda plan, folder: {"reverb_append_1k_rows_s": 100}}
    monkeypatch.setattr(buffer, "SECTIONS", sections)
    found = buffer.measure(QUICK, tmp_path, list(sections))
    assert found["error"] == "broken: out of luck"
    assert found["vs_reverb_append"] == 3.0
    assert found["vs_reverb_lease"] is None


def test_only_rows_that_arrived_whole_are_counted() -> None:
    frame = experience_pb2.Frame(payload=b"rows")
    frame.header.payload_xxh3 = checksum(b"rows")
    for group_id in (1, 2):
        frame.header.groups.add(group_id=group_id, members=8)
    assert arrived_in(Lease(step=1, attempt=1, group_ids=(2,), frames=(frame,))) == (8, 4)
    with pytest.raises(ValueError, match="1 of 2 groups did not arrive"):
        arrived_in(Lease(step=1, attempt=1, group_ids=(2, 3), frames=(frame,)))
    frame.payload = b"r0ws"
    with pytest.raises(ValueError, match="arrived damaged"):
        arrived_in(Lease(step=1, attempt=1, group_ids=(2,), frames=(frame,)))


def test_the_slope_leaves_out_the_first_minute() -> None:
    assert slope([90.0, 10.0, 12.0, 14.0]) == 2.0
    assert slope([10.0]) == 0.0
