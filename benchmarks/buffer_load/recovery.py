"""How long a buffer that was killed takes to come back over a long journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.buffer_load.plan import Plan
from benchmarks.buffer_load.server import RunShape, serving
from benchmarks.buffer_load.site import site

GROUP_SIZE, ROW_BYTES, GROUPS_A_FRAME = 8, 1024, 128


def recovery(plan: Plan, folder: Path) -> dict[str, Any]:
    """Seconds from the start of the process until Status answers, less what an empty folder takes."""
    frames = max(1, plan.recovery_mb * 10**6 // (GROUPS_A_FRAME * GROUP_SIZE * ROW_BYTES))
    shape = RunShape(group_size=GROUP_SIZE, groups_per_step=GROUPS_A_FRAME, steps=frames)
    with serving(folder / "empty", shape.run_file()) as server:
        server.stop()
        empty_s = server.start()
    with site(folder / "recovery", shape) as here:
        here.append(frames, GROUPS_A_FRAME, ROW_BYTES, in_flight=16)
        here.dismiss()
        here.server.kill()
        journal_mb = sum(path.stat().st_size for path in here.server.journal.iterdir()) / 1e6
        full_s = here.server.start()
        ready = here.server.status().groups_ready
    name = "1gb" if plan.recovery_mb == 1000 else f"{plan.recovery_mb}mb"
    return {
        f"recovery_{name}_s": round(full_s - empty_s, 2),
        "recovery_journal_mb": round(journal_mb),
        "recovery_empty_start_s": round(empty_s, 2),
        "recovery_groups_lost": frames * GROUPS_A_FRAME - ready,
    }
