"""How much of everything is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Amounts of one run of the benchmark. What is measured in rounds gives the median round."""

    rounds: int
    append_rows: int  #: of 1 KB, a round
    frame_kib: tuple[int, ...]  #: frame sizes that are tried; the first one counts
    append_64k_mb: int  #: a round
    single_appends: int
    lease_rows: int  #: of 1 KB
    lease_1m_mb: int
    cycles: int
    backlog_rows: int  #: buffered while the cost of an operation is taken
    backlog_steps: int  #: a round
    streams: int
    stream_frames: int  #: from each
    recovery_mb: int
    peer_s: float  #: of each kind of load on a peer


FULL = Plan(
    rounds=3,
    append_rows=200_000,
    frame_kib=(1024, 256, 512, 2048),
    append_64k_mb=512,
    single_appends=10_000,
    lease_rows=300_000,
    lease_1m_mb=1024,
    cycles=2000,
    backlog_rows=1_000_000,
    backlog_steps=100,
    streams=1000,
    stream_frames=20,
    recovery_mb=1000,
    peer_s=3.0,
)
QUICK = Plan(
    rounds=1,
    append_rows=150_000,
    frame_kib=(1024,),
    append_64k_mb=256,
    single_appends=4000,
    lease_rows=100_000,
    lease_1m_mb=256,
    cycles=500,
    backlog_rows=200_000,
    backlog_steps=50,
    streams=1000,
    stream_frames=2,
    recovery_mb=200,
    peer_s=1.0,
)
