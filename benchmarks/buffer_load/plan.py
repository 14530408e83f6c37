"""How much of everything is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Amounts of one run of the benchmark. What is measured in rounds gives the median round."""

    rounds: int
    rows_1k: int  #: a round
    frame_kib: tuple[int, ...]  #: frame sizes that are tried; the first one counts
    rows_64k_mb: int  #: a round
    rows_1m_mb: int  #: a round
    single_appends: int  #: a round
    cycles: int  #: a round
    backlog_rows: int  #: buffered while the cost of an operation is taken
    backlog_steps: int  #: a round
    streams: int
    stream_frames: int  #: from each
    recovery_mb: int
    peer_s: float  #: of each kind of load on a peer


FULL = Plan(
    rounds=3,
    rows_1k=200_000,
    frame_kib=(1024, 256, 512, 2048),
    rows_64k_mb=512,
    rows_1m_mb=512,
    single_appends=10_000,
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
    rows_1k=120_000,
    frame_kib=(1024,),
    rows_64k_mb=192,
    rows_1m_mb=192,
    single_appends=2500,
    cycles=300,
    backlog_rows=1_000_000,
    backlog_steps=40,
    streams=100,
    stream_frames=4,
    recovery_mb=100,
    peer_s=0.4,
)
