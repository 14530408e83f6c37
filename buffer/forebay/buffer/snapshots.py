"""Snapshot files: the folded state of the oldest segments, beside them, so that a restart need not read them.

    NNNNNNNN.snapshot = magic | uncompressed bytes | CRC32C of what follows | zstd of a Snapshot message

A snapshot is made from the journal alone, by another process (`python -m forebay.buffer.snapshots`): the buffer that
serves meanwhile does not stop for it, and what it holds in memory is not trusted. The two newest are kept; a damaged
one is passed over, because the segments of the older one are kept as well.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import struct
from collections.abc import Sequence
from pathlib import Path

import google_crc32c

from forebay.buffer.disk import Disk
from forebay.buffer.ledger import State
from forebay.buffer.records import Position, Scan
from forebay.buffer.state_snapshot import FORMAT, Snapshot, from_message, to_message
from forebay.wire import bounded_zstd
from forebay.wire.errors import WireError

log = logging.getLogger(__name__)

KEPT = 2
_HEADER = struct.Struct("<8sQI")
_MAGIC = b"FBSNAP\x00\x01"
_MAX_BYTES = 4 << 30
_LEVEL = 1
_PR_SET_PDEATHSIG = 1
_SUFFIX = ".snapshot"


def snapshot_path(folder: Path, segment: int) -> Path:
    """The snapshot of all segments up to `segment`."""
    return folder / f"{segment:08d}{_SUFFIX}"


def numbers(folder: Path) -> list[int]:
    """Which snapshots there are, ascending."""
    return sorted(int(path.stem) for path in folder.glob(f"*{_SUFFIX}"))


def write(folder: Path, snapshot: Snapshot, disk: Disk) -> Path:
    """Make the snapshot's file, atomically and durably. Raises OSError."""
    content = snapshot.SerializeToString()
    body = bounded_zstd.compress(content, _LEVEL)
    path = snapshot_path(folder, snapshot.segment)
    disk.replace(path, _HEADER.pack(_MAGIC, len(content), google_crc32c.value(body)) + body)
    return path


def read(path: Path) -> Snapshot:
    """What the file holds. Raises ValueError when that is not a whole snapshot."""
    data = path.read_bytes()
    if len(data) < _HEADER.size:
        raise ValueError(f"{path}: {len(data)} bytes are no snapshot")
    magic, size, crc = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if magic != _MAGIC or size > _MAX_BYTES or crc != google_crc32c.value(body):
        raise ValueError(f"{path}: damaged")
    try:
        snapshot = Snapshot.FromString(bounded_zstd.decompress(body, size))
    except WireError as error:
        raise ValueError(f"{path}: {error}") from error
    if snapshot.format != FORMAT:
        raise ValueError(f"{path}: format {snapshot.format}, expected {FORMAT}")
    return snapshot


def newest(folder: Path) -> Snapshot | None:
    """The newest whole snapshot; damaged ones are passed over and named."""
    for number in reversed(numbers(folder)):
        try:
            return read(snapshot_path(folder, number))
        except (ValueError, OSError) as error:
            log.warning("%s; going back to an older snapshot or the journal itself", error)
    return None


def make(folder: Path, segment: int, *, retain_bytes: int, disk: Disk | None = None) -> Path:
    """Fold the sealed segments up to `segment` into a snapshot, starting from the newest one, and drop old snapshots.

    Of the payloads that nobody needs, the last `retain_bytes` stay listed. Raises JournalDamaged, OSError.
    """
    disk = disk or Disk()
    state, next_lsn = fold(folder, newest(folder), segment)
    snapshot = to_message(state, youngest(state.released, retain_bytes))
    snapshot.segment, snapshot.next_lsn = segment, next_lsn
    path = write(folder, snapshot, disk)
    for number in numbers(folder)[:-KEPT]:
        snapshot_path(folder, number).unlink()
    return path


def fold(folder: Path, base: Snapshot | None, segment: int) -> tuple[State, int]:
    """The state after the sealed segments up to `segment`, from `base` on, and the next LSN. Raises JournalDamaged."""
    state = from_message(base) if base is not None else State()
    scan = Scan(folder, repair=False, after=base, until=segment, payloads=False)
    for record in scan:
        state.apply(record.event, record.position)
    return state, scan.tail.lsn


def youngest(released: Sequence[Position], limit_bytes: int) -> list[Position]:
    """The last of the positions whose payloads together take `limit_bytes` at most."""
    size, first = 0, len(released)
    while first and size + released[first - 1].payload_bytes <= limit_bytes:
        first -= 1
        size += released[first].payload_bytes
    return list(released[first:])


def _end_with_parent() -> None:
    """A buffer that was killed leaves no writer behind in a folder that another one will serve."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make one snapshot with what the machine has to spare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("segment", type=int)
    parser.add_argument("retain_bytes", type=int)
    given = parser.parse_args(arguments)
    _end_with_parent()
    os.nice(15)
    make(given.folder, given.segment, retain_bytes=given.retain_bytes)


if __name__ == "__main__":
    main()
