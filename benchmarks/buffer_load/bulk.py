"""Many rows a frame, in and out: 1 KB, 64 KB and 1 MB rows, and the bare journal beside them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.buffer_load.disk import fdatasync_ms, journal_mb_s
from benchmarks.buffer_load.plan import Plan
from benchmarks.buffer_load.server import RunShape
from benchmarks.buffer_load.site import Phase, site

KIB, MIB = 1 << 10, 1 << 20
PROCESSES = 1  #: of samplers; a second one takes the server's core
IN_FLIGHT = 16  #: frames on the way or being made, of each process


@dataclass(frozen=True, slots=True, kw_only=True)
class Bulk:
    """Rows of one size in whole frames."""

    row_bytes: int
    group_size: int
    frame_bytes: int
    frames_a_step: int = 8

    @property
    def groups_a_frame(self) -> int:
        """At least one."""
        return max(1, self.frame_bytes // (self.row_bytes * self.group_size))

    def frames(self, total_bytes: int) -> int:
        """Of each process, for about so much altogether; a whole number of steps."""
        frames = total_bytes // (self.groups_a_frame * self.group_size * self.row_bytes * PROCESSES)
        return max(1, frames // self.frames_a_step) * self.frames_a_step

    def shape(self, frames: int) -> RunShape:
        """Of a run that trains so many frames."""
        return RunShape(
            group_size=self.group_size,
            groups_per_step=self.groups_a_frame * self.frames_a_step,
            steps=frames // self.frames_a_step,
        )


def rows_1k(plan: Plan, folder: Path) -> dict[str, Any]:
    """Rows of 1 KB a second, in and out, in frames of several sizes; the plan's first size counts."""
    found = {kib: _in_and_out(plan, folder, _bulk_1k(kib), plan.rows_1k * KIB) for kib in plan.frame_kib}
    appended, leased = found[plan.frame_kib[0]]
    return {
        "append_1k_rows_s": round(appended.rows_s),
        "append_1k_frame_kib": plan.frame_kib[0],
        "append_1k_p50_ms": round(appended.latency_ms(0.5), 1),
        "append_1k_server_cores": appended.server_cores,
        "append_1k_rows_s_by_frame_kib": {kib: round(phases[0].rows_s) for kib, phases in found.items()},
        "lease_1k_rows_s": round(leased.rows_s),
        "lease_1k_step_p50_ms": round(leased.latency_ms(0.5), 2),
        "lease_1k_server_cores": leased.server_cores,
    }


def rows_64k(plan: Plan, folder: Path) -> dict[str, Any]:
    """Durable megabytes a second with rows of 64 KB, and of a bare journal with the same records and syncs."""
    total_bytes = plan.rows_64k_mb * MIB
    appended, _ = _in_and_out(plan, folder, Bulk(row_bytes=64 * KIB, group_size=8, frame_bytes=MIB), total_bytes)
    bare = statistics.median(
        journal_mb_s(folder / "bare", record_bytes=MIB, records_a_sync=IN_FLIGHT * PROCESSES, total_bytes=total_bytes)
        for _ in range(plan.rounds)
    )
    return {
        "append_64k_mb_s": round(appended.mb_s, 1),
        "append_64k_server_cores": appended.server_cores,
        "journal_64k_mb_s": round(bare, 1),
        "append_64k_vs_journal": round(appended.mb_s / bare, 3),
        "fdatasync_ms": round(fdatasync_ms(folder / "bare"), 3),
    }


def rows_1m(plan: Plan, folder: Path) -> dict[str, Any]:
    """Megabytes a second with rows and frames of 1 MiB, in and out."""
    bulk = Bulk(row_bytes=MIB, group_size=1, frame_bytes=MIB, frames_a_step=32)
    appended, leased = _in_and_out(plan, folder, bulk, plan.rows_1m_mb * MIB)
    return {
        "append_1m_mb_s": round(appended.mb_s, 1),
        "lease_1m_mb_s": round(leased.mb_s, 1),
        "lease_1m_server_cores": leased.server_cores,
    }


def _bulk_1k(frame_kib: int) -> Bulk:
    return Bulk(row_bytes=KIB, group_size=8, frame_bytes=frame_kib * KIB)


def _in_and_out(plan: Plan, folder: Path, bulk: Bulk, round_bytes: int) -> tuple[Phase, Phase]:
    """Rounds of appending about `round_bytes` to one fresh buffer and training them; the median ones."""
    frames = bulk.frames(round_bytes)
    with site(folder / "bulk", bulk.shape(frames * PROCESSES * plan.rounds), processes=PROCESSES) as here:
        rounds = [
            (
                here.append(frames, bulk.groups_a_frame, bulk.row_bytes, IN_FLIGHT),
                here.train(frames * PROCESSES // bulk.frames_a_step),
            )
            for _ in range(plan.rounds)
        ]
    return middle([appended for appended, _ in rounds]), middle([leased for _, leased in rounds])


def middle(rounds: Sequence[Phase]) -> Phase:
    """The round of median speed."""
    return sorted(rounds, key=lambda done: done.rows_s)[len(rounds) // 2]
