"""The journal keeps what it acknowledged, whatever the disk does, and says so when it cannot."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from forebay.buffer.disk import Disk
from forebay.buffer.errors import JournalDamaged, JournalFailed
from forebay.buffer.journal import Journal
from forebay.buffer.records import Position, Recovered, Scan, Tail, record_header, segment_path
from forebay.wire.v1 import journal_pb2
from tests.buffer.support import UnsyncedDisk

FRESH = Tail(segment=1, offset=28, lsn=1, salt=b"")


def event(number: int) -> journal_pb2.Event:
    return journal_pb2.Event(paused=journal_pb2.Paused(reason=f"event {number}"))


def write(
    folder: Path, payloads: Sequence[bytes], *, segment_bytes: int = 1 << 20, disk: Disk | None = None
) -> list[Position]:
    """A journal of these payloads, one sync each, left as a crash would leave it."""
    tail = scan(folder)[1]
    journal = Journal(folder, tail, segment_bytes=segment_bytes, disk=disk or UnsyncedDisk())
    positions = []
    for number, payload in enumerate(payloads):
        positions.append(journal.append(event(number), payload))
        journal.flush()
    return positions


def scan(folder: Path, *, repair: bool = True) -> tuple[list[Recovered], Tail]:
    scanner = Scan(folder, repair=repair)
    return list(scanner), scanner.tail


def test_reads_back_over_segments(tmp_path: Path) -> None:
    payloads = [bytes([i]) * 300 for i in range(20)]
    positions = write(tmp_path, payloads, segment_bytes=1000)
    records, tail = scan(tmp_path)
    assert [record.position for record in records] == positions
    assert len(list(tmp_path.iterdir())) > 5
    journal = Journal(tmp_path, tail, segment_bytes=1000)
    assert [journal.read(position)[1] for position in positions] == payloads
    more = journal.append(event(99), b"more")
    journal.flush()
    assert journal.read(more) == (event(99), b"more")
    assert more.lsn == 21


def test_torn_tail_at_every_byte(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    positions = write(whole, [b"first", b"second", b"third" * 20])
    size = segment_path(whole, 1).stat().st_size
    for cut in range(positions[2].offset, size):
        torn = tmp_path / "torn"
        shutil.copytree(whole, torn)
        with open(segment_path(torn, 1), "r+b") as file:
            file.truncate(cut)
        records, tail = scan(torn)
        assert [record.position.lsn for record in records] == [1, 2]
        assert tail.lsn == 3
        assert segment_path(torn, 1).stat().st_size == positions[2].offset
        write(torn, [b"again"])
        assert len(scan(torn)[0]) == 3
        shutil.rmtree(torn)


def test_header_torn_at_every_byte(tmp_path: Path) -> None:
    write(tmp_path, [b"x" * 600, b"y" * 600], segment_bytes=700)
    second = segment_path(tmp_path, 2)
    content = second.read_bytes()
    for cut in range(28):
        second.write_bytes(content[:cut])
        records, tail = scan(tmp_path)
        assert len(records) == 1
        assert (tail.segment, tail.lsn, tail.salt) == (2, 2, b"")


def test_reader_beside_a_writer_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, [b"first", b"second"])
    path = segment_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert len(scan(tmp_path, repair=False)[0]) == 1
    size = path.stat().st_size
    assert len(scan(tmp_path, repair=False)[0]) == 1
    assert path.stat().st_size == size


def test_bit_flip_in_the_middle_is_refused(tmp_path: Path) -> None:
    positions = write(tmp_path, [b"first", b"second", b"third"])
    path = segment_path(tmp_path, 1)
    content = path.read_bytes()
    for offset in range(positions[1].offset, positions[1].payload_offset):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 4]) + content[offset + 1 :])
        with pytest.raises(JournalDamaged, match=rf"offset {positions[1].offset} \(LSN 2\)"):
            scan(tmp_path)
        assert path.stat().st_size == len(content)


def test_a_payload_that_is_not_what_it_was_counts_as_gone(tmp_path: Path) -> None:
    """Whoever folds the journal knows whether it is still needed; a crash while it is given back leaves half of it."""
    positions = write(tmp_path, [b"first", b"second", b"third"])
    path = segment_path(tmp_path, 1)
    content = path.read_bytes()
    for offset in range(positions[1].payload_offset, positions[1].end):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 4]) + content[offset + 1 :])
        records, _ = scan(tmp_path)
        assert [record.intact for record in records[:3]] == [True, False, True]


def test_damage_before_the_last_segment_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [b"x" * 600, b"y" * 600], segment_bytes=700)
    first = segment_path(tmp_path, 1)
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(JournalDamaged, match="LSN 1"):
        scan(tmp_path)
    first.unlink()
    with pytest.raises(JournalDamaged, match=r"\[1\] are missing"):
        scan(tmp_path)


def test_unsynced_records_written_out_of_order_are_a_torn_tail(tmp_path: Path) -> None:
    """Power loss may keep the last page of one write and lose the one before: nobody was told of either."""
    positions = write(tmp_path, [b"first"])
    salt = scan(tmp_path)[1].salt
    late = Position(lsn=3, segment=1, offset=0, event_bytes=2, payload_bytes=4)
    body = record_header(late, b"ev", b"late", durable_lsn=1, salt=salt) + b"ev" + b"late"
    path = segment_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[: positions[0].end] + bytes(80) + body)
    records, tail = scan(tmp_path)
    assert len(records) == 1
    assert tail.offset == positions[0].end


def test_a_payload_cannot_pass_for_a_record(tmp_path: Path) -> None:
    forged = Position(lsn=2, segment=1, offset=0, event_bytes=2, payload_bytes=4)
    body = record_header(forged, b"ev", b"evil", durable_lsn=9, salt=bytes(8)) + b"ev" + b"evil"
    positions = write(tmp_path, [b"first", body])
    path = segment_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert len(scan(tmp_path)[0]) == 1
    assert path.stat().st_size == positions[1].offset


def test_released_payloads_read_as_such(tmp_path: Path) -> None:
    positions = write(tmp_path, [b"a" * 9000, b"b" * 9000])
    _, tail = scan(tmp_path)
    journal = Journal(tmp_path, tail)
    before = journal.disk_bytes
    journal.release(positions[:1])
    assert journal.disk_bytes < before
    with pytest.raises(JournalDamaged, match="LSN 1"):
        journal.read(positions[0])
    assert journal.read(positions[1])[1] == b"b" * 9000
    records, _ = scan(tmp_path)
    assert [record.intact for record in records] == [False, True]


class FailingDisk(UnsyncedDisk):
    """Fails the n-th sync, or every write until there is room."""

    def __init__(self, *, failing_sync: int = -1) -> None:
        self.syncs, self._failing_sync = 0, failing_sync
        self.room = threading.Event()
        self.room.set()
        self.refused = threading.Event()

    def sync(self, fd: int) -> None:
        self.syncs += 1
        if self.syncs == self._failing_sync:
            raise OSError(errno.EIO, "input/output error")

    def write(self, fd: int, parts: Sequence[bytes], offset: int) -> int:
        if not self.room.is_set():
            self.refused.set()
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().write(fd, [parts[0][:7]], offset)


def test_a_failed_sync_is_final(tmp_path: Path) -> None:
    failures: list[JournalFailed] = []
    disk = FailingDisk(failing_sync=3)
    journal = Journal(tmp_path, FRESH, disk=disk, on_failure=failures.append)
    journal.append(event(1))
    journal.flush()
    journal.append(event(2))
    with pytest.raises(JournalFailed, match="could not be written"):
        journal.flush()
    with pytest.raises(JournalFailed):
        journal.append(event(3))
    journal.close()
    assert len(failures) == 1
    assert journal.durable_lsn == 1
    assert disk.syncs == 3


def test_a_full_disk_waits_for_room(tmp_path: Path) -> None:
    disk = FailingDisk()
    journal = Journal(tmp_path, FRESH, disk=disk, room_retry_s=0.01)
    first = journal.append(event(1), b"first")
    journal.flush()
    disk.room.clear()
    second = journal.append(event(2), b"second")
    assert disk.refused.wait(10)
    assert journal.full
    assert journal.durable_lsn == 1
    disk.room.set()
    journal.flush()
    assert not journal.full
    assert [journal.read(position)[1] for position in (first, second)] == [b"first", b"second"]


def test_close_vouches_for_the_last_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path, FRESH)
    last = journal.append(event(1), b"payload")
    journal.close()
    path = segment_path(tmp_path, 1)
    content = bytearray(path.read_bytes())
    content[last.end - 1] ^= 1
    path.write_bytes(content)
    assert [record.intact for record in scan(tmp_path)[0]] == [False, True], "no torn tail: it was acknowledged"
