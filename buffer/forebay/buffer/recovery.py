"""From a journal folder to the state that it holds."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from forebay.buffer import snapshots
from forebay.buffer.errors import JournalDamaged
from forebay.buffer.ledger import State
from forebay.buffer.records import Position, Scan, Tail, segment_path
from forebay.buffer.state_snapshot import from_message

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What was found: the state, where the next record goes, and payloads that nobody needs but that still take room.

    `released` has the earliest first.
    """

    state: State
    tail: Tail
    released: list[Position]


def recover(folder: Path, *, repair: bool) -> Recovery:
    """Fold a journal, from its newest snapshot on. Without `repair` nothing is changed on disk.

    Raises JournalDamaged.
    """
    snapshot = snapshots.newest(folder)
    state = from_message(snapshot) if snapshot else State()
    gone = dict[int, Position]()
    scan = Scan(folder, repair=repair, after=snapshot)
    for record in scan:
        state.apply(record.event, record.position)
        if not record.intact:
            gone[record.position.lsn] = record.position
    for lsn in sorted(gone.keys() & state.frames.keys()):
        raise JournalDamaged(
            f"{segment_path(folder, gone[lsn].segment)}: the payload of the record at offset {gone[lsn].offset} "
            f"(LSN {lsn}) is damaged, but still needed: restore this file from a copy, or start a new run"
        )
    if scan.torn_bytes and repair:
        log.warning("%s: cut off %d bytes that a crash left half written (never acknowledged)", folder, scan.torn_bytes)
    released = [position for position in state.released if position.lsn not in gone]
    state.released = []
    return Recovery(state=state, tail=scan.tail, released=released)
