"""Rows in: bulk frames of 1 KB and 64 KB rows, single rows, and the bare journal beside them."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.buffer_load.disk import fdatasync_ms, journal_mb_s
from benchmarks.buffer_load.plan import Plan
from benchmarks.buffer_load.server import RunShape
from benchmarks.buffer_load.site import Phase, site

GROUP_SIZE = 8
IN_FLIGHT = 16  #: frames on the way or being made, of each process
PROCESSES = 1
SINGLE_IN_FLIGHT = 16
_ANY_GROUPS_A_STEP = 128


def append_1k(plan: Plan, folder: Path) -> dict[str, Any]:
    """Durable rows of 1 KB a second, in frames of several sizes; the plan's first size counts."""
    found = {kib: _bulk(plan, folder, 1024, kib << 10, plan.append_rows) for kib in plan.frame_kib}
    best = found[plan.frame_kib[0]]
    return {
        "append_1k_rows_s": round(_middle(best).rows_s),
        "append_1k_frame_kib": plan.frame_kib[0],
        "append_1k_rows_s_by_frame_kib": {kib: round(_middle(rounds).rows_s) for kib, rounds in found.items()},
        "append_1k_p50_ms": round(_middle(best).latency_ms(0.5), 1),
        "append_1k_server_cores": _middle(best).server_cores,
    }


def append_64k(plan: Plan, folder: Path) -> dict[str, Any]:
    """Durable megabytes a second with rows of 64 KB, and of a bare journal with the same records and syncs."""
    rows, frame_bytes = (plan.append_64k_mb << 20) // (64 << 10), 1 << 20
    rounds = _bulk(plan, folder, 64 << 10, frame_bytes, rows)
    bare = [
        journal_mb_s(
            folder / "bare",
            record_bytes=frame_bytes,
            records_a_sync=IN_FLIGHT * PROCESSES,
            total_bytes=plan.append_64k_mb << 20,
        )
        for _ in range(plan.rounds)
    ]
    middle = _middle(rounds)
    return {
        "append_64k_mb_s": round(middle.mb_s, 1),
        "append_64k_server_cores": middle.server_cores,
        "journal_64k_mb_s": round(statistics.median(bare), 1),
        "append_64k_vs_journal": round(middle.mb_s / statistics.median(bare), 3),
        "fdatasync_ms": round(fdatasync_ms(folder / "bare"), 3),
    }


def single(plan: Plan, folder: Path) -> dict[str, Any]:
    """Appends of one row of 1 KB each, through one client."""
    shape = RunShape(group_size=1, groups_per_step=1, steps=plan.single_appends * plan.rounds)
    with site(folder / "single", shape) as here:
        rounds = [here.append(plan.single_appends, 1, 1024, SINGLE_IN_FLIGHT) for _ in range(plan.rounds)]
    middle = _middle(rounds)
    return {
        "single_append_s": round(middle.rows_s),
        "single_append_p50_ms": round(middle.latency_ms(0.5), 2),
        "single_append_p99_ms": round(middle.latency_ms(0.99), 2),
        "single_append_in_flight": SINGLE_IN_FLIGHT,
        "single_append_server_cores": middle.server_cores,
    }


def _bulk(plan: Plan, folder: Path, row_bytes: int, frame_bytes: int, rows: int) -> list[Phase]:
    """Rounds of about `rows` rows in frames of about `frame_bytes`, to one fresh buffer."""
    groups_a_frame = max(1, frame_bytes // (row_bytes * GROUP_SIZE))
    frames = max(1, rows // (groups_a_frame * GROUP_SIZE * PROCESSES))
    groups = frames * groups_a_frame * PROCESSES * plan.rounds
    shape = RunShape(group_size=GROUP_SIZE, groups_per_step=_ANY_GROUPS_A_STEP, steps=-(-groups // _ANY_GROUPS_A_STEP))
    with site(folder / "bulk", shape, processes=PROCESSES) as here:
        return [here.append(frames, groups_a_frame, row_bytes, IN_FLIGHT) for _ in range(plan.rounds)]


def _middle(rounds: list[Phase]) -> Phase:
    return sorted(rounds, key=lambda done: done.rows_s)[len(rounds) // 2]
