"""Constant load for many minutes: whether latency or memory grows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.buffer_load.server import RunShape
from benchmarks.buffer_load.site import Site, phase, site

STEPS_S = 10
GROUP_SIZE, GROUPS_PER_STEP, ROW_BYTES = 8, 64, 1024  #: 5,120 rows a second, each step a frame of 512 KiB


def soak(minutes: int, folder: Path, minute_s: int = 60) -> dict[str, Any]:
    """A frame is appended and a step trained ten times a second; p99 and memory by the minute, and their slopes."""
    steps = STEPS_S * minute_s
    shape = RunShape(group_size=GROUP_SIZE, groups_per_step=GROUPS_PER_STEP, steps=steps * minutes)
    with site(folder / "soak", shape) as here:
        found = [_minute(here, steps) for _ in range(minutes)]
    return {
        "soak_minutes": minutes,
        **{key: [minute[key] for minute in found] for key in found[0]},
        **{f"{key}_slope_a_minute": slope([minute[key] for minute in found]) for key in found[0]},
    }


def slope(values: Sequence[float]) -> float:
    """What a straight line through the values grows by from one to the next; of the first, which warms up, without."""
    steady = values[1:] if len(values) > 2 else values
    if len(steady) < 2:
        return 0.0
    return round(float(np.polyfit(np.arange(len(steady)), steady, 1)[0]), 4)


def _minute(here: Site, steps: int) -> dict[str, float]:
    [sampler] = here.samplers
    sampler.ask("admit", groups=steps * GROUPS_PER_STEP)
    cpu_s = here.server.cpu_s()
    sampler.tell(
        "append", frames=steps, groups_a_frame=GROUPS_PER_STEP, row_bytes=ROW_BYTES, in_flight=8, frames_s=STEPS_S
    )
    here.learner.tell("train", steps=steps)
    trained = phase([here.learner.hear()], here.server.cpu_s() - cpu_s)
    appended = phase([sampler.hear()], here.server.cpu_s() - cpu_s)
    minute = {
        "soak_rows_s": round(trained.rows_s, 1),
        "soak_append_p99_ms": round(appended.latency_ms(0.99), 2),
        "soak_rss_mb": round(here.server.memory_mb(), 1),
        "soak_server_cores": trained.server_cores,
    }
    print(f"buffer: soak: {minute}", file=sys.stderr, flush=True)
    return minute
