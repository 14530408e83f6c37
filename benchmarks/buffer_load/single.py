"""One row a frame and one row a step: what an operation costs when it travels alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.buffer_load.bulk import middle
from benchmarks.buffer_load.plan import Plan
from benchmarks.buffer_load.server import RunShape
from benchmarks.buffer_load.site import site

IN_FLIGHT = 16  #: appends on the way at once, through one client
ROW_BYTES = 1024


def single(plan: Plan, folder: Path) -> dict[str, Any]:
    """Appends of one row each, through one client; then steps of one row, leased and committed one by one."""
    shape = RunShape(group_size=1, groups_per_step=1, steps=plan.single_appends * plan.rounds)
    with site(folder / "single", shape) as here:
        appended = middle([here.append(plan.single_appends, 1, ROW_BYTES, IN_FLIGHT) for _ in range(plan.rounds)])
        cycles = middle([here.train(plan.cycles) for _ in range(plan.rounds)])
    return {
        "single_append_s": round(appended.rows_s),
        "single_append_p50_ms": round(appended.latency_ms(0.5), 2),
        "single_append_p99_ms": round(appended.latency_ms(0.99), 2),
        "single_append_in_flight": IN_FLIGHT,
        "single_append_server_cores": appended.server_cores,
        "cycle_p50_ms": round(cycles.latency_ms(0.5), 2),
        "cycle_p99_ms": round(cycles.latency_ms(0.99), 2),
        "cycle_server_cores": cycles.server_cores,
    }
