"""Rows out: whole steps of 1 KB and 1 MB rows leased and committed, and the shortest cycle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.buffer_load.plan import Plan
from benchmarks.buffer_load.server import RunShape
from benchmarks.buffer_load.site import Phase, site

_FRAMES_A_STEP = 8
_FILL_IN_FLIGHT = 16


def lease_1k(plan: Plan, folder: Path) -> dict[str, Any]:
    """Rows of 1 KB a second that reached the learner; steps of 8 MiB in frames of 1 MiB."""
    done = _drain(folder, plan.lease_rows << 10, row_bytes=1024, group_size=8, groups_a_frame=128)
    return {
        "lease_1k_rows_s": round(done.rows_s),
        "lease_1k_step_p50_ms": round(done.latency_ms(0.5), 2),
        "lease_1k_server_cores": done.server_cores,
    }


def lease_1m(plan: Plan, folder: Path) -> dict[str, Any]:
    """Megabytes a second that reached the learner with rows and frames of 1 MiB."""
    done = _drain(folder, plan.lease_1m_mb << 20, row_bytes=1 << 20, group_size=1, groups_a_frame=1)
    return {"lease_1m_mb_s": round(done.mb_s, 1), "lease_1m_server_cores": done.server_cores}


def cycle(plan: Plan, folder: Path) -> dict[str, Any]:
    """Milliseconds to lease and commit a step of one row."""
    shape = RunShape(group_size=1, groups_per_step=1, steps=plan.cycles)
    with site(folder / "cycle", shape) as here:
        here.append(plan.cycles, 1, 1024, _FILL_IN_FLIGHT)
        done = here.train(plan.cycles)
    return {
        "cycle_p50_ms": round(done.latency_ms(0.5), 2),
        "cycle_p99_ms": round(done.latency_ms(0.99), 2),
        "cycle_server_cores": done.server_cores,
    }


def _drain(folder: Path, total_bytes: int, *, row_bytes: int, group_size: int, groups_a_frame: int) -> Phase:
    """Fill a buffer with about `total_bytes`, then train all of it."""
    groups_per_step = groups_a_frame * _FRAMES_A_STEP
    steps = max(1, total_bytes // (groups_per_step * group_size * row_bytes))
    shape = RunShape(group_size=group_size, groups_per_step=groups_per_step, steps=steps)
    with site(folder / "lease", shape) as here:
        here.append(steps * _FRAMES_A_STEP, groups_a_frame, row_bytes, _FILL_IN_FLIGHT)
        return here.train(steps)
