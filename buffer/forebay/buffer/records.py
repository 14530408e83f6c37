"""The journal's bytes: segment files of framed records, and how a scan tells a torn tail from damage.

A segment is a header (magic, first LSN, salt, CRC32C) and records, each a header and two bodies:

    magic "FBR1" | event bytes | payload bytes | LSN | durable LSN | CRC32C of payload | CRC32C of header and event

Every checksum starts from the segment's random salt, so that bytes which a client sent can never pass for a record.
The durable LSN is what had been synced when the record was written: a later record that vouches for an unreadable
one proves damage; without a voucher the unreadable one was never acknowledged, and is a torn tail.
A payload of zeros whose checksum fails was given back to the file system on purpose (`Journal.release`).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from forebay.buffer.errors import JournalDamaged
from forebay.wire.v1 import journal_pb2

SEGMENT_HEADER = struct.Struct("<8sQ8sI")
RECORD_HEADER = struct.Struct("<4sIIQQII")
MAX_RECORD_BYTES = 16 << 20

_SEGMENT_MAGIC = b"FBJSEG\x00\x01"
_RECORD_MAGIC = b"FBR1"
SEGMENT_SUFFIX = ".journal"

#: A segment's bytes; slices of either are bytes.
SegmentData = bytes | mmap.mmap


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a record lies: segment number and byte offset of its header, with the sizes of its two bodies."""

    lsn: int
    segment: int
    offset: int
    event_bytes: int
    payload_bytes: int

    @property
    def payload_offset(self) -> int:
        """Byte offset of the payload in the segment."""
        return self.offset + RECORD_HEADER.size + self.event_bytes

    @property
    def end(self) -> int:
        """Byte offset behind the record."""
        return self.payload_offset + self.payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """One record of a scan. `intact` is False when its payload was released, wholly or, by a crash, in part."""

    event: journal_pb2.Event
    position: Position
    intact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Where the next record goes. `salt` is empty when the segment is still to be made."""

    segment: int
    offset: int
    lsn: int
    salt: bytes


def map_file(path: Path) -> SegmentData:
    """The file's bytes, not read before they are looked at."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""  # an empty file cannot be mapped
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def segment_path(folder: Path, segment: int) -> Path:
    """The file of segment number `segment`, counted from 1."""
    return folder / f"{segment:08d}{SEGMENT_SUFFIX}"


def segment_header(first_lsn: int, salt: bytes) -> bytes:
    """The bytes a segment starts with; `salt` is 8 bytes."""
    body = SEGMENT_HEADER.pack(_SEGMENT_MAGIC, first_lsn, salt, 0)[:-4]
    return body + struct.pack("<I", google_crc32c.value(body))


def record_header(position: Position, event: bytes, payload: bytes, *, durable_lsn: int, salt: bytes) -> bytes:
    """The header of the record whose bodies are `event` and `payload`."""
    payload_crc = _crc(salt, payload)
    body = RECORD_HEADER.pack(_RECORD_MAGIC, len(event), len(payload), position.lsn, durable_lsn, payload_crc, 0)[:-4]
    return body + struct.pack("<I", _crc(salt, body, event))


def parse_segment_header(data: SegmentData) -> tuple[int, bytes] | None:
    """First LSN and salt, or None when the header is not whole."""
    if len(data) < SEGMENT_HEADER.size:
        return None
    magic, first_lsn, salt, crc = SEGMENT_HEADER.unpack_from(data)
    whole = magic == _SEGMENT_MAGIC and crc == google_crc32c.value(data[: SEGMENT_HEADER.size - 4])
    return (first_lsn, salt) if whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record as it lies in a segment. `intact` is False when its payload is not what was written."""

    lsn: int
    durable_lsn: int
    event: bytes
    payload: bytes
    payload_bytes: int
    intact: bool = True

    @property
    def size_bytes(self) -> int:
        """All that it takes."""
        return RECORD_HEADER.size + len(self.event) + self.payload_bytes


def parse_record(data: SegmentData, offset: int, salt: bytes, *, payloads: bool = True) -> Record | None:
    """The record at `offset` of `data`, or None when the checksum of its header and event fails.

    Without `payloads` the payload is not looked at: it counts as intact and comes back empty.
    """
    start = offset + RECORD_HEADER.size
    if start > len(data):
        return None
    magic, event_bytes, payload_bytes, lsn, durable_lsn, payload_crc, crc = RECORD_HEADER.unpack_from(data, offset)
    end = start + event_bytes + payload_bytes
    if magic != _RECORD_MAGIC or event_bytes + payload_bytes > MAX_RECORD_BYTES or end > len(data):
        return None
    event = data[start : start + event_bytes]
    if crc != _crc(salt, data[offset : start - 4], event):
        return None
    if not payloads:
        return Record(lsn=lsn, durable_lsn=durable_lsn, event=event, payload=b"", payload_bytes=payload_bytes)
    payload = data[start + event_bytes : end]
    return Record(
        lsn=lsn,
        durable_lsn=durable_lsn,
        event=event,
        payload=payload,
        payload_bytes=payload_bytes,
        intact=payload_crc == _crc(salt, payload),
    )


def record_at(
    data: SegmentData, offset: int, salt: bytes, lsn: int, *, sealed: bool, payloads: bool = True
) -> Record | None:
    """The record `lsn` at `offset`, or None where it is torn, damaged or another.

    One whose payload is neither what was written nor zeros counts if it was acknowledged, because its segment is
    `sealed` or a later record vouches for it: a crash while a payload was given back leaves half of it, and whoever
    folds the journal knows whether it is still needed.
    """
    record = parse_record(data, offset, salt, payloads=payloads)
    if record is None or record.lsn != lsn:
        return None
    if record.intact or not record.payload.strip(b"\0") or sealed:
        return record
    return record if is_acknowledged(data, offset, salt, lsn) else None


def is_acknowledged(data: SegmentData, offset: int, salt: bytes, lsn: int) -> bool:
    """Whether a record behind `offset` says that `lsn`, which should lie there, had been synced."""
    return any(record.durable_lsn >= lsn for _, record in records_from(data, offset + 1, salt))


def parse_parts(head: bytes, payload: bytes, position: Position, salt: bytes) -> bytes | None:
    """The event in `head`, a record's header and event read apart from its payload; None unless both are whole."""
    if len(head) != RECORD_HEADER.size + position.event_bytes or len(payload) != position.payload_bytes:
        return None
    magic, event_bytes, payload_bytes, lsn, _, payload_crc, crc = RECORD_HEADER.unpack_from(head)
    said, event = (magic, event_bytes, payload_bytes, lsn), head[RECORD_HEADER.size :]
    if said != (_RECORD_MAGIC, position.event_bytes, position.payload_bytes, position.lsn):
        return None
    whole = crc == _crc(salt, head[: RECORD_HEADER.size - 4], event) and payload_crc == _crc(salt, payload)
    return event if whole else None


class Scan:
    """Reads a journal, from its start or behind a snapshot. Iterate once, then `tail` says where it ends.

    Damage raises JournalDamaged.
    """

    def __init__(
        self,
        folder: Path,
        *,
        repair: bool,
        after: journal_pb2.Snapshot | None = None,
        until: int | None = None,
        payloads: bool = True,
    ) -> None:
        """With `repair` a torn tail is cut off the file; without, it is only passed over (a reader beside a writer).

        `until` is the last segment to read, a sealed one. Without `payloads` these are not verified.
        """
        self._folder, self._repair, self._until, self._payloads = folder, repair, until, payloads
        first, lsn = (after.segment + 1, after.next_lsn) if after else (1, 1)
        self.tail = Tail(segment=first, offset=SEGMENT_HEADER.size, lsn=lsn, salt=b"")
        self.torn_bytes = 0

    def __iter__(self) -> Iterator[Recovered]:
        first = self.tail.segment
        present = {int(path.stem) for path in self._folder.glob(f"*{SEGMENT_SUFFIX}")}
        last = self._until or max(present, default=0)
        missing = sorted(set(range(first, last + 1)) - present)
        if missing:
            raise JournalDamaged(f"{self._folder}: segments {missing} are missing: put them back, or start a new run")
        for number in range(first, last + 1):
            yield from self._segment(number, last=number == last and self._until is None)

    def _segment(self, number: int, *, last: bool) -> Iterator[Recovered]:
        path = segment_path(self._folder, number)
        data = map_file(path)
        head = parse_segment_header(data)
        if head is None and last and len(data) <= SEGMENT_HEADER.size:
            self._torn(path, data, 0)
            self.tail = Tail(segment=number, offset=SEGMENT_HEADER.size, lsn=self.tail.lsn, salt=b"")
            return
        if head is None or head[0] != self.tail.lsn:
            raise JournalDamaged(f"{path}: the header at offset 0 is damaged (LSN {self.tail.lsn} and on)")
        yield from self._records(path, number, data, head[1], last=last)

    def _records(self, path: Path, number: int, data: SegmentData, salt: bytes, *, last: bool) -> Iterator[Recovered]:
        offset, lsn = SEGMENT_HEADER.size, self.tail.lsn
        while offset < len(data):
            record = record_at(data, offset, salt, lsn, sealed=not last, payloads=self._payloads)
            if record is None:
                self._stop_unless_torn(path, data, offset, salt, lsn, last=last)
                break
            position = Position(
                lsn=lsn,
                segment=number,
                offset=offset,
                event_bytes=len(record.event),
                payload_bytes=record.payload_bytes,
            )
            yield Recovered(event=journal_pb2.Event.FromString(record.event), position=position, intact=record.intact)
            offset, lsn = position.end, lsn + 1
        self.tail = Tail(segment=number, offset=offset, lsn=lsn, salt=salt)

    def _stop_unless_torn(
        self, path: Path, data: SegmentData, offset: int, salt: bytes, lsn: int, *, last: bool
    ) -> None:
        """Cut off a torn tail; raise for an acknowledged record."""
        if not last or is_acknowledged(data, offset, salt, lsn):
            raise JournalDamaged(
                f"{path}: the record at offset {offset} (LSN {lsn}) is damaged, but was acknowledged: "
                "restore this file from a copy, or start a new run"
            )
        self._torn(path, data, offset)

    def _torn(self, path: Path, data: SegmentData, offset: int) -> None:
        self.torn_bytes = len(data) - offset
        if self._repair:
            os.truncate(path, offset)


def records_from(data: SegmentData, offset: int, salt: bytes) -> Iterator[tuple[int, Record]]:
    """Every record from `offset` on whose header and event are whole, wherever it lies, with its own offset."""
    at = data.find(_RECORD_MAGIC, offset)
    while at >= 0:
        record = parse_record(data, at, salt)
        if record is not None:
            yield at, record
        at = data.find(_RECORD_MAGIC, at + (record.size_bytes if record is not None else 1))


def _crc(salt: bytes, *parts: bytes) -> int:
    crc = google_crc32c.value(salt)
    for part in parts:
        crc = google_crc32c.extend(crc, part)
    return int(crc)
