"""Whether the samplers notice that a snapshot of a sealed segment is being made."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.buffer_load.plan import Plan
from benchmarks.buffer_load.server import RunShape
from benchmarks.buffer_load.site import Phase, Site, phase, site

GROUP_SIZE, ROW_BYTES = 8, 1024
FILL_GROUPS, FILL_FRAMES = 128, 8  #: of the frames that fill a segment, and how many between two looks at it
STREAM_FRAMES_S, STREAM_S = 200, 5  #: frames of one group each, durable, due at fixed times: a pause delays all in it


def snapshot(plan: Plan, folder: Path) -> dict[str, Any]:
    """Latency of a steady stream of small appends with nothing else going on, and while a snapshot is made."""
    shape = RunShape(group_size=GROUP_SIZE, groups_per_step=FILL_GROUPS, steps=10_000)
    quiet, during, seconds = list[float](), list[float](), list[float]()
    with site(folder / "snapshot", shape) as here:
        for _ in range(plan.rounds):
            quiet += _stream(here).latencies_ms
            _fill_segment(here)
            sealed_s = time.time()
            during += _stream(here).latencies_ms
            seconds.append(_newest_snapshot_s(here) - sealed_s)
    return {
        "snapshot_s": round(statistics.median(seconds), 2),
        "snapshot_append_p50_ms": round(statistics.median(during), 2),
        "snapshot_append_longest_ms": round(max(during), 2),
        "snapshot_quiet_append_p50_ms": round(statistics.median(quiet), 2),
        "snapshot_quiet_append_longest_ms": round(max(quiet), 2),
    }


def _stream(here: Site) -> Phase:
    [sampler] = here.samplers
    frames = STREAM_FRAMES_S * STREAM_S
    sampler.ask("admit", groups=frames)
    cpu_s = here.server.cpu_s()
    answer = sampler.ask(
        "append", frames=frames, groups_a_frame=1, row_bytes=ROW_BYTES, in_flight=64, frames_s=STREAM_FRAMES_S
    )
    return phase([answer], here.server.cpu_s() - cpu_s)


def _fill_segment(here: Site) -> None:
    """Append until the journal begins its next file, upon which the buffer has a snapshot made of the full one."""
    before = _segments(here)
    while _segments(here) == before:
        here.append(FILL_FRAMES, FILL_GROUPS, ROW_BYTES, in_flight=FILL_FRAMES)


def _segments(here: Site) -> set[Path]:
    return set(here.server.journal.glob("*.journal"))


def _newest_snapshot_s(here: Site) -> float:
    """When the snapshot was finished, in seconds since 1970. Raises RuntimeError when the stream ended before."""
    sealed = max(int(path.stem) for path in _segments(here)) - 1
    path = here.server.journal / f"{sealed:08d}.snapshot"
    if not path.exists():
        raise RuntimeError(f"no snapshot of segment {sealed} within {STREAM_S} s of appends")
    return path.stat().st_mtime
