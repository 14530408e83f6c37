"""Whether an operation costs more when much is buffered: the same work over a small and a large backlog."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.buffer_load.plan import Plan
from benchmarks.buffer_load.server import RunShape
from benchmarks.buffer_load.site import Site, site

SMALL_ROWS = 1000
GROUP_SIZE, GROUPS_PER_STEP = 8, 16  #: the product's defaults
ROW_BYTES = 64
_WARM_STEPS = 20


def cost(plan: Plan, folder: Path) -> dict[str, Any]:
    """Mean microseconds a row of append, lease and commit over both backlogs, which take turns."""
    rounds = max(3, plan.rounds)
    with (
        site(folder / "small", _shape(SMALL_ROWS, plan, rounds)) as small,
        site(folder / "large", _shape(plan.backlog_rows, plan, rounds)) as large,
    ):
        for here, rows in ((small, SMALL_ROWS), (large, plan.backlog_rows)):
            _fill(here, rows)
            _work(here, _WARM_STEPS)
        pairs = [(_work(small, plan.backlog_steps), _work(large, plan.backlog_steps)) for _ in range(rounds)]
        rss_mb = large.server.memory_mb()
    small_us, large_us = (statistics.median(side) for side in zip(*pairs, strict=True))
    name = "1m" if plan.backlog_rows == 1_000_000 else f"{plan.backlog_rows // 1000}k"
    return {
        f"cost_{name}_vs_1k": round(large_us / small_us, 3),
        "cost_1k_us_a_row": round(small_us, 2),
        f"cost_{name}_us_a_row": round(large_us, 2),
        f"cost_{name}_rss_mb": round(rss_mb),
    }


def _shape(backlog_rows: int, plan: Plan, rounds: int) -> RunShape:
    steps = -(-backlog_rows // (GROUP_SIZE * GROUPS_PER_STEP)) + _WARM_STEPS + rounds * plan.backlog_steps
    return RunShape(group_size=GROUP_SIZE, groups_per_step=GROUPS_PER_STEP, steps=steps)


def _fill(here: Site, rows: int) -> None:
    """In the frames of the measured work, since a lease brings whole frames."""
    here.append(-(-rows // (GROUP_SIZE * GROUPS_PER_STEP)), GROUPS_PER_STEP, ROW_BYTES, in_flight=64)


def _work(here: Site, steps: int) -> float:
    """Append and train `steps` steps, so that the backlog stays as it is; microseconds a row."""
    appended = here.append(steps, GROUPS_PER_STEP, ROW_BYTES, in_flight=8)
    trained = here.train(steps)
    return 1e6 * (appended.seconds / appended.rows + trained.seconds / trained.rows)
