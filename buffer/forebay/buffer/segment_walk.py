"""One segment file after the other, record by record, for readers that must say exactly what is damaged.

`records.Scan` folds a journal and stops at the first damage; this goes on behind it. Changes nothing on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.buffer.errors import JournalDamaged
from forebay.buffer.records import SEGMENT_HEADER, SegmentData, parse_segment_header, record_at, records_from
from forebay.wire.v1 import journal_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """One record: `offset` of its header and `end` behind its payload, in bytes of the segment file.

    `intact` is False when the payload was released; `payload` then holds zeros, and other bytes too where a crash
    left half of it.
    """

    lsn: int
    offset: int
    end: int
    event: bytes
    payload: bytes
    intact: bool
    durable_lsn: int  #: what had been synced when this was written

    def parsed(self) -> journal_pb2.Event:
        """The event as a message."""
        return journal_pb2.Event.FromString(self.event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Where the record `lsn` should be and is not. `next_offset` and `next_lsn`: the next whole record, if any.

    `acknowledged`: a later record vouches for this one, so it is no crash's torn tail.
    """

    lsn: int
    offset: int
    next_offset: int | None
    next_lsn: int | None
    acknowledged: bool


def segment_files(folder: Path) -> list[Path]:
    """The segments of a journal folder, in order of their numbers."""
    return sorted(folder.glob("*.journal"), key=lambda path: int(path.stem))


def walk(data: SegmentData, salt: bytes, first_lsn: int, *, sealed: bool) -> Iterator[Walked | Gap]:
    """Every record of a segment's bytes, and what lies between them. A gap without `next_lsn` is the last.

    `sealed`: a later segment exists, so that all of this one was synced.
    """
    offset, lsn = SEGMENT_HEADER.size, first_lsn
    while offset < len(data):
        item = _record_at(data, offset, salt, lsn, sealed=sealed) or _gap_at(data, offset, salt, lsn)
        yield item
        if isinstance(item, Walked):
            offset, lsn = item.end, lsn + 1
        elif item.next_offset is None or item.next_lsn is None:
            return
        else:
            offset, lsn = item.next_offset, item.next_lsn


def read_records(folder: Path) -> Iterator[Walked]:
    """Every whole record of an undamaged journal, one segment in memory at a time; a torn tail ends it.

    Raises JournalDamaged.
    """
    files, expected = segment_files(folder), None
    for path in files:
        try:
            last, data = path == files[-1], path.read_bytes()
        except FileNotFoundError:  # a running buffer deletes its oldest segments once nobody needs them
            continue
        head = parse_segment_header(data)
        if head is None and last and len(data) <= SEGMENT_HEADER.size:
            return
        if head is None or expected not in (None, head[0]):
            raise _damaged(path, 0)
        expected = head[0]
        for item in walk(data, head[1], head[0], sealed=not last):
            if isinstance(item, Gap):
                if item.acknowledged or not last:
                    raise _damaged(path, item.offset)
                return
            yield item
            expected = item.lsn + 1


def _damaged(path: Path, offset: int) -> JournalDamaged:
    return JournalDamaged(f"{path}: damaged at offset {offset}; `forebay buffer RUN --verify` says what is lost")


def _record_at(data: SegmentData, offset: int, salt: bytes, lsn: int, *, sealed: bool) -> Walked | None:
    record = record_at(data, offset, salt, lsn, sealed=sealed)
    if record is None:
        return None
    return Walked(
        lsn=record.lsn,
        offset=offset,
        end=offset + record.size_bytes,
        event=record.event,
        payload=record.payload,
        intact=record.intact,
        durable_lsn=record.durable_lsn,
    )


def _gap_at(data: SegmentData, offset: int, salt: bytes, lsn: int) -> Gap:
    later = [(at, record) for at, record in records_from(data, offset, salt) if record.lsn > lsn]
    return Gap(
        lsn=lsn,
        offset=offset,
        next_offset=later[0][0] if later else None,
        next_lsn=later[0][1].lsn if later else None,
        acknowledged=any(record.durable_lsn >= lsn for _, record in later),
    )
