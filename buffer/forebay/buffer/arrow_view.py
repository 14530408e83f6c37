"""A sealed journal segment as an Arrow table over a memory map: payloads are looked at where they lie, never copied."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from forebay.buffer.errors import JournalDamaged
from forebay.buffer.records import RECORD_HEADER, SEGMENT_HEADER, parse_segment_header
from forebay.buffer.segment_walk import Gap, walk
from forebay.wire.v1 import journal_pb2

SCHEMA = pa.schema(
    [
        pa.field("lsn", pa.uint64()),
        pa.field("at_unix_s", pa.float64()),
        pa.field("kind", pa.string()),
        pa.field("groups", pa.list_(pa.uint64())),
        pa.field("event", pa.binary()),
        pa.field("payload", pa.binary_view()),
    ]
)

_VIEW_BYTES = 16
_INLINE_BYTES = 12
_MAX_OFFSET = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A record: its event, and where its payload lies in the file; None when that was released."""

    lsn: int
    event: bytes
    payload: tuple[int, int] | None  #: offset and size in bytes


def segment_table(path: Path, *, verify: bool = True) -> pa.Table:
    """One row a record: `lsn`, `at_unix_s`, `kind`, `groups` (ids of a frame's groups), `event`, `payload`.

    `event` is a serialized `journal_pb2.Event`. `payload` is a binary_view into the mapped file: the map lives as long
    as the table, and what is released meanwhile reads as zeros; what was released before, or differs from its checksum
    as half of a release does, is null. `verify` checks every checksum, which reads the whole file once; without it only
    headers and events are read. Raises JournalDamaged with file, offset and LSN; a segment that is still written may
    end in half a record, which counts as damage.

    Arrow slices views, but has few kernels for them: filter without the payload column, or slice and cast to binary.
    """
    with path.open("rb") as file:
        if path.stat().st_size < SEGMENT_HEADER.size:
            raise JournalDamaged(f"{path}: shorter than a segment's header: damaged, or not written yet")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(mapped) > _MAX_OFFSET:
        raise JournalDamaged(f"{path}: {len(mapped)} bytes, which no segment has")
    head = parse_segment_header(mapped[: SEGMENT_HEADER.size])
    if head is None:
        raise JournalDamaged(f"{path}: the header at offset 0 is damaged")
    first_lsn, salt = head
    rows = _verified(path, mapped, salt, first_lsn) if verify else _indexed(path, mapped, first_lsn)
    return _table(list(rows), mapped)


def _verified(path: Path, mapped: mmap.mmap, salt: bytes, first_lsn: int) -> Iterator[_Row]:
    for item in walk(mapped, salt, first_lsn, sealed=True):
        if isinstance(item, Gap):
            raise _damaged(path, item.offset, item.lsn)
        size = len(item.payload)
        yield _Row(lsn=item.lsn, event=item.event, payload=(item.end - size, size) if item.intact else None)


def _indexed(path: Path, mapped: mmap.mmap, first_lsn: int) -> Iterator[_Row]:
    content = np.frombuffer(mapped, np.uint8)
    offset, expected = SEGMENT_HEADER.size, first_lsn
    while offset < len(mapped):
        start = offset + RECORD_HEADER.size
        header = RECORD_HEADER.unpack_from(mapped, offset) if start <= len(mapped) else (b"", 0, 0, 0, 0, 0, 0)
        event_bytes, payload_bytes, lsn = header[1:4]
        payload_at = start + event_bytes
        if lsn != expected or payload_at + payload_bytes > len(mapped):
            raise _damaged(path, offset, expected)
        released = payload_bytes > 0 and _is_zero(content[payload_at : payload_at + payload_bytes])
        yield _Row(lsn=lsn, event=mapped[start:payload_at], payload=None if released else (payload_at, payload_bytes))
        offset, expected = payload_at + payload_bytes, expected + 1


def _is_zero(part: np.ndarray) -> bool:
    """Looks at the rest only when the beginning says so: a page that nobody reads is not loaded."""
    return not part[:64].any() and not part.any()


def _damaged(path: Path, offset: int, lsn: int) -> JournalDamaged:
    return JournalDamaged(f"{path}: the record at offset {offset} (LSN {lsn}) is damaged, or not whole yet")


def _table(rows: list[_Row], mapped: mmap.mmap) -> pa.Table:
    events = [journal_pb2.Event.FromString(row.event) for row in rows]
    columns = [
        pa.array([row.lsn for row in rows], pa.uint64()),
        pa.array([event.at_unix_s for event in events], pa.float64()),
        pa.array([event.WhichOneof("kind") for event in events], pa.string()),
        pa.array(
            [[group.group_id for group in event.appended.header.groups] for event in events],
            SCHEMA.field("groups").type,
        ),
        pa.array([row.event for row in rows], pa.binary()),
        _payloads([row.payload for row in rows], mapped),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _payloads(places: list[tuple[int, int] | None], mapped: mmap.mmap) -> pa.Array:
    """Views into the map: the buffer of views and the validity bits are all that is made."""
    views = b"".join(_view(mapped, *place) if place is not None else bytes(_VIEW_BYTES) for place in places)
    valid = _bits(place is not None for place in places)
    buffers = [pa.py_buffer(valid), pa.py_buffer(views), pa.py_buffer(mapped)]
    return pa.Array.from_buffers(pa.binary_view(), len(places), buffers)


def _view(mapped: mmap.mmap, offset: int, size: int) -> bytes:
    """Arrow's 16 bytes: the size, then 12 bytes of a short value, or prefix, buffer number and offset of a long one."""
    if size <= _INLINE_BYTES:
        return struct.pack(f"<i{_INLINE_BYTES}s", size, mapped[offset : offset + size])
    return struct.pack("<i4sii", size, mapped[offset : offset + 4], 0, offset)


def _bits(values: Iterable[bool]) -> bytes:
    return np.packbits(np.fromiter(values, np.bool_), bitorder="little").tobytes()
