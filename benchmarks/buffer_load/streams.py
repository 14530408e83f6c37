"""Many samplers at once, each a member with a connection and an append stream of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.buffer_load.plan import Plan
from benchmarks.buffer_load.server import RunShape
from benchmarks.buffer_load.site import site

PROCESSES = 4
GROUP_SIZE = 8
_IN_FLIGHT = 4


def streams(plan: Plan, folder: Path) -> dict[str, Any]:
    """Rows sent and rows in the ledger, and the server's memory at its peak."""
    members_each = max(1, plan.streams // PROCESSES)
    shape = RunShape(group_size=GROUP_SIZE, groups_per_step=PROCESSES * members_each, steps=plan.stream_frames)
    with site(folder / "streams", shape, processes=PROCESSES, members_each=members_each) as here:
        idle_mb = here.server.memory_mb()
        sent = here.append(plan.stream_frames, 1, 1024, _IN_FLIGHT)
        ledger = here.server.ledger()
        peak_mb = here.server.memory_mb("VmHWM")
    return {
        "streams": here.members,
        "streams_rows_sent": sent.rows,
        "streams_rows_in_ledger": sum(row.trajectories for row in ledger.rows if row.state == "produced"),
        "streams_rows_s": round(sent.rows_s),
        "streams_p99_ms": round(sent.latency_ms(0.99), 1),
        "streams_joined_rss_mb": round(idle_mb),
        "streams_peak_rss_mb": round(peak_mb),
    }
