"""The journal: the buffer's append-only log, one writer thread, group commit.

`append` gives a record its place at once and returns; the writer thread writes whatever has gathered, syncs once,
and reports how far the disk has got. A failed sync is never tried again (what it lost is unknowable): the journal
stops, nobody gets an acknowledgement, and the service restarts from what the disk holds. A full disk is no failure:
the writer waits for room, `full` says so, and what was accepted goes out as soon as there is some.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from forebay.buffer.disk import Disk, write_all
from forebay.buffer.errors import JournalDamaged, JournalFailed
from forebay.buffer.records import (
    RECORD_HEADER,
    SEGMENT_HEADER,
    SEGMENT_SUFFIX,
    Position,
    Tail,
    parse_parts,
    parse_segment_header,
    record_header,
    segment_header,
    segment_path,
)
from forebay.wire.v1 import journal_pb2

SEGMENT_BYTES = 256 << 20
_RECORDS_A_WRITE = 256
#: What one sync covers at most: beyond it a longer group commit saves nothing and keeps acknowledgements back.
#: There is no timer: while a sync runs, the next group gathers.
GROUP_COMMIT_BYTES = 8 << 20
T = TypeVar("T")

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    position: Position
    event: bytes
    payload: bytes


class Journal:
    """Appends from one thread, reads from any. `on_...` run on the writer thread."""

    def __init__(
        self,
        folder: Path,
        tail: Tail,
        *,
        on_progress: Callable[[], None] = lambda: None,
        on_failure: Callable[[JournalFailed], None] = lambda error: None,
        on_sealed: Callable[[], None] = lambda: None,
        disk: Disk | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        room_retry_s: float = 0.5,
    ) -> None:
        self.folder = folder
        self._disk = disk or Disk()
        self._on_progress, self._on_failure, self._on_sealed = on_progress, on_failure, on_sealed
        self.sealed_segment = tail.segment - 1  #: no record will be added to it or to those before
        self._segment_bytes, self._room_retry_s = segment_bytes, room_retry_s
        self._next_segment, self._next_offset, self._next_lsn = tail.segment, tail.offset, tail.lsn
        self._pending: list[_Pending] = []
        self._wake = threading.Condition()
        self._closing = False
        self._open_segment, self._salt, self._fd = tail.segment, tail.salt, -1
        self._readers: dict[int, tuple[int, bytes]] = {}
        self._readers_lock = threading.Lock()
        self._failure: JournalFailed | None = None
        self.pending_bytes = 0
        self.written_lsn = self.durable_lsn = tail.lsn - 1
        self.full = False
        self.disk_bytes = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def last_lsn(self) -> int:
        """LSN of the newest record, durable or not."""
        return self._next_lsn - 1

    def append(
        self,
        event: journal_pb2.Event,
        payload: bytes = b"",
        apply: Callable[[journal_pb2.Event, Position], None] = lambda event, position: None,
    ) -> Position:
        """Queue a record and say where it will lie. Raises JournalFailed once the disk has failed.

        `apply` sees the record first: what it refuses by raising is not written.
        """
        if self._failure is not None:
            raise self._failure
        body = event.SerializeToString()
        position = self._place(len(body), len(payload))
        try:
            apply(event, position)
        except BaseException as error:  # its place stays empty: nothing may be written behind it
            self._fail(
                JournalFailed(f"{self.folder}: LSN {position.lsn} failed half-way ({error!r}): restart the buffer")
            )
            raise
        with self._wake:
            self._pending.append(_Pending(position=position, event=body, payload=payload))
            self.pending_bytes += len(body) + len(payload)
            self._wake.notify_all()
        return position

    def flush(self) -> None:
        """Block until everything appended so far is durable. Raises JournalFailed."""
        wanted = self.last_lsn
        with self._wake:
            self._wake.wait_for(lambda: self.durable_lsn >= wanted or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def read(self, position: Position) -> tuple[journal_pb2.Event, bytes]:
        """Event and payload of a durable record. Raises JournalDamaged when its checksums fail."""
        fd, salt = self._reader(position.segment)
        head = os.pread(fd, position.payload_offset - position.offset, position.offset)
        payload = os.pread(fd, position.payload_bytes, position.payload_offset)
        event = parse_parts(head, payload, position, salt)
        if event is None:
            raise JournalDamaged(
                f"{segment_path(self.folder, position.segment)}: the record at offset {position.offset} "
                f"(LSN {position.lsn}) does not read back as it was written"
            )
        return journal_pb2.Event.FromString(event), payload

    def release(self, positions: Iterable[Position]) -> None:
        """Give payloads that nobody will read again back to the file system, once durable; their events stay."""
        self.flush()
        for segment, group in itertools.groupby(positions, key=lambda position: position.segment):
            with contextlib.suppress(FileNotFoundError):  # the whole segment is gone already
                self._punch(segment, group)

    def drop(self, before: int) -> None:
        """Delete the segments with lower numbers: nobody will read them again."""
        for path in sorted(self.folder.glob(f"*{SEGMENT_SUFFIX}")):
            if int(path.stem) < before:
                self._count(-path.stat().st_blocks * 512)
                path.unlink()
        with self._readers_lock:
            for segment in [segment for segment in self._readers if segment < before]:
                os.close(self._readers.pop(segment)[0])
        self._disk.sync_folder(self.folder)

    def close(self) -> None:
        """Write what is pending and a record that vouches for it; then stop the writer. Raises JournalFailed."""
        if self._failure is None and self.last_lsn:
            self.flush()
            self.append(journal_pb2.Event())
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        for fd, _ in self._readers.values():
            os.close(fd)
        self._readers.clear()

    def _punch(self, segment: int, positions: Iterable[Position]) -> None:
        fd = os.open(segment_path(self.folder, segment), os.O_RDWR)
        try:
            before = os.fstat(fd).st_blocks
            for position in positions:
                self._disk.punch(fd, position.payload_offset, position.payload_bytes)
            self._count((os.fstat(fd).st_blocks - before) * 512)
        finally:
            os.close(fd)

    def _place(self, event_bytes: int, payload_bytes: int) -> Position:
        size = RECORD_HEADER.size + event_bytes + payload_bytes
        if self._next_offset > SEGMENT_HEADER.size and self._next_offset + size > self._segment_bytes:
            self._next_segment, self._next_offset = self._next_segment + 1, SEGMENT_HEADER.size
        position = Position(
            lsn=self._next_lsn,
            segment=self._next_segment,
            offset=self._next_offset,
            event_bytes=event_bytes,
            payload_bytes=payload_bytes,
        )
        self._next_lsn, self._next_offset = self._next_lsn + 1, position.end
        return position

    def _run(self) -> None:
        try:
            while batch := self._take():
                self._write(batch)
        except Exception as error:
            self._fail(JournalFailed(f"{self.folder}: the journal could not be written ({error}): restart the buffer"))
        finally:
            if self._fd >= 0:
                os.close(self._fd)

    def _take(self) -> list[_Pending]:
        with self._wake:
            self._wake.wait_for(lambda: self._pending or self._closing)
            count = _fitting(self._pending)
            batch, self._pending = self._pending[:count], self._pending[count:]
        return batch

    def _write(self, batch: list[_Pending]) -> None:
        for start in range(0, len(batch), _RECORDS_A_WRITE):
            self._write_run(batch[start : start + _RECORDS_A_WRITE])
        self.written_lsn = batch[-1].position.lsn
        self._on_progress()
        self._disk.sync(self._fd)
        self._report(batch)

    def _write_run(self, batch: list[_Pending]) -> None:
        while batch:
            segment = batch[0].position.segment
            self._enter(segment, batch[0].position.lsn)
            here = [item for item in batch if item.position.segment == segment]
            parts = [part for item in here for part in (self._header(item), item.event, item.payload)]
            self._write_at(here[0].position.offset, parts)
            self._count(here[-1].position.end - here[0].position.offset)
            batch = batch[len(here) :]

    def _header(self, item: _Pending) -> bytes:
        return record_header(item.position, item.event, item.payload, durable_lsn=self.durable_lsn, salt=self._salt)

    def _enter(self, segment: int, first_lsn: int) -> None:
        """Have the segment's file open, made with a durable header if it is new."""
        if self._fd >= 0 and segment == self._open_segment:
            return
        if self._fd >= 0:
            self._disk.sync(self._fd)
            os.close(self._fd)
        if segment != self._open_segment:
            self._salt = b""
            self.sealed_segment = self._open_segment
            self._on_sealed()
        self._open_segment = segment
        self._fd = self._with_room(lambda: os.open(segment_path(self.folder, segment), os.O_RDWR | os.O_CREAT, 0o644))
        if not self._salt:
            self._salt = os.urandom(8)
            header = segment_header(first_lsn, self._salt)
            self._write_at(0, [header])
            self._disk.sync(self._fd)
            self._disk.sync_folder(self.folder)

    def _write_at(self, offset: int, parts: list[bytes]) -> None:
        self._with_room(lambda: write_all(self._disk, self._fd, parts, offset))

    def _with_room(self, write: Callable[[], T]) -> T:
        """Do it, waiting for room on a full disk for as long as it takes. Raises OSError for anything else."""
        while True:
            try:
                done = write()
            except OSError as error:
                if error.errno not in _NO_ROOM or self._closing:
                    raise
                self.full = True
                with self._wake:
                    self._wake.wait_for(lambda: self._closing, timeout=self._room_retry_s)
            else:
                self.full = False
                return done

    def _report(self, batch: list[_Pending]) -> None:
        with self._wake:
            self.durable_lsn = batch[-1].position.lsn
            self.pending_bytes -= sum(len(item.event) + len(item.payload) for item in batch)
            self._wake.notify_all()
        self._on_progress()

    def _count(self, disk_bytes: int) -> None:
        with self._wake:
            self.disk_bytes += disk_bytes

    def _fail(self, error: JournalFailed) -> None:
        with self._wake:
            self._failure = error
            self._wake.notify_all()
        self._on_failure(error)

    def _reader(self, segment: int) -> tuple[int, bytes]:
        with self._readers_lock:
            if segment not in self._readers:
                fd = os.open(segment_path(self.folder, segment), os.O_RDONLY)
                head = parse_segment_header(os.pread(fd, SEGMENT_HEADER.size, 0))
                if head is None:
                    os.close(fd)
                    raise JournalDamaged(f"{segment_path(self.folder, segment)}: the header at offset 0 is damaged")
                self._readers[segment] = (fd, head[1])
            return self._readers[segment]


def _fitting(pending: list[_Pending]) -> int:
    """How many of the records go into one group commit; one at least, when there is any."""
    size = 0
    for count, item in enumerate(pending):
        size += len(item.event) + len(item.payload)
        if size > GROUP_COMMIT_BYTES:
            return count + 1
    return len(pending)
