"""A segment as an Arrow table: everything in it, nothing copied, damage named."""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from forebay.buffer.arrow_view import SCHEMA, segment_table
from forebay.buffer.errors import JournalDamaged
from forebay.buffer.journal import Journal
from forebay.buffer.records import Position, Tail, segment_path
from forebay.wire.v1 import common_pb2, experience_pb2, journal_pb2
from forebay.wire.version import Version
from tests.buffer.support import UnsyncedDisk, frame_of

MEMBER = common_pb2.Member(role=common_pb2.ROLE_SAMPLER, id="s", incarnation=1)


def appended(*groups: int) -> journal_pb2.Event:
    permits = [experience_pb2.Permit(group_id=group, attempt=1) for group in groups]
    header = frame_of(MEMBER, 0, permits, Version(1, 0)).header
    return journal_pb2.Event(at_unix_s=1.5 + len(groups), appended=journal_pb2.Appended(header=header))


def sealed(folder: Path, records: list[tuple[journal_pb2.Event, bytes]]) -> tuple[Path, list[Position]]:
    """Segment 1 of a closed journal with these records (and the last one, which vouches for them)."""
    journal = Journal(folder, Tail(segment=1, offset=28, lsn=1, salt=b""), disk=UnsyncedDisk())
    positions = [journal.append(event, payload) for event, payload in records]
    journal.close()
    return segment_path(folder, 1), positions


def mapped_range(path: Path) -> tuple[int, int]:
    """Where this process has `path` mapped."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    assert lines, "not mapped"
    first, last = lines[0].split(" ")[0], lines[-1].split(" ")[0]
    return int(first.split("-")[0], 16), int(last.split("-")[1], 16)


@pytest.mark.parametrize("verify", [True, False])
def test_round_trip(tmp_path: Path, verify: bool) -> None:
    payloads = [b"", b"x", b"twelve bytes", b"thirteen byte", bytes(range(256)) * 40]
    events = [appended(*range(index)) for index in range(len(payloads))]
    path, _ = sealed(tmp_path, list(zip(events, payloads, strict=True)))
    table = segment_table(path, verify=verify)
    table.validate(full=True)
    assert table.schema.equals(SCHEMA)
    assert table["lsn"].to_pylist() == [1, 2, 3, 4, 5, 6]
    assert table["kind"].to_pylist() == ["appended"] * 5 + [None]
    assert table["groups"].to_pylist() == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], []]
    assert table["at_unix_s"].to_pylist() == [1.5, 2.5, 3.5, 4.5, 5.5, 0.0]
    assert [journal_pb2.Event.FromString(event) for event in table["event"].to_pylist()[:5]] == events
    assert table["payload"].to_pylist() == [*payloads, b""]
    assert pc.cast(table["payload"], pa.binary()).to_pylist() == [*payloads, b""]
    assert table.slice(3, 2)["payload"].to_pylist() == payloads[3:]


@pytest.mark.parametrize("verify", [True, False])
def test_payloads_are_not_copied(tmp_path: Path, verify: bool) -> None:
    path, positions = sealed(tmp_path, [(appended(group), bytes([group + 1]) * (1 << 20)) for group in range(24)])
    before = pa.total_allocated_bytes()
    table = segment_table(path, verify=verify)
    assert pa.total_allocated_bytes() - before < 1 << 20
    (chunk,) = table["payload"].chunks
    _, views, data = chunk.buffers()
    start, end = mapped_range(path)
    assert start <= data.address
    assert data.address + data.size <= end
    assert views.size == 16 * 25
    assert struct.unpack("<i4sii", views[3 * 16 : 4 * 16]) == (1 << 20, b"\4" * 4, 0, positions[3].payload_offset)
    assert table["payload"][3].as_py() == bytes([4]) * (1 << 20)


def test_the_map_lives_as_long_as_the_table(tmp_path: Path) -> None:
    path, _ = sealed(tmp_path, [(appended(0), b"long enough to be a view")])
    payload = segment_table(path)["payload"]
    path.unlink()
    assert payload[0].as_py() == b"long enough to be a view"


@pytest.mark.parametrize("verify", [True, False])
def test_released_payloads_are_null(tmp_path: Path, verify: bool) -> None:
    path, positions = sealed(tmp_path, [(appended(0), b"a" * 9000), (appended(1), b"b" * 9000)])
    content = bytearray(path.read_bytes())
    content[positions[0].payload_offset : positions[0].end] = bytes(9000)
    path.write_bytes(content)
    table = segment_table(path, verify=verify)
    assert table["payload"].to_pylist() == [None, b"b" * 9000, b""]
    assert table["payload"].null_count == 1


def test_a_payload_that_is_not_what_it_was_is_null(tmp_path: Path) -> None:
    path, positions = sealed(tmp_path, [(appended(group), b"payload" * 10) for group in range(2)])
    path.write_bytes(changed(path.read_bytes(), positions[0].payload_offset + 5))
    assert segment_table(path)["payload"].to_pylist() == [None, b"payload" * 10, b""]
    assert segment_table(path, verify=False)["payload"].null_count == 0, "unverified, its damage goes unseen"


def changed(content: bytes, offset: int) -> bytes:
    return content[:offset] + b"?" + content[offset + 1 :]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path, positions = sealed(tmp_path, [(appended(group), b"payload" * 10) for group in range(3)])
    whole = path.read_bytes()
    path.write_bytes(changed(whole, positions[1].offset + 3))
    with pytest.raises(JournalDamaged, match=rf"{path}: .* offset {positions[1].offset} \(LSN 2\) is damaged"):
        segment_table(path)
    path.write_bytes(changed(whole, positions[1].offset + 12))  # its LSN
    with pytest.raises(JournalDamaged, match=rf"offset {positions[1].offset} \(LSN 2\)"):
        segment_table(path, verify=False)
    path.write_bytes(whole[: positions[2].end - 1])
    for verify in (True, False):
        with pytest.raises(JournalDamaged, match=rf"offset {positions[2].offset} \(LSN 3\)"):
            segment_table(path, verify=verify)
    path.write_bytes(whole[: positions[2].offset + 5])
    for verify in (True, False):
        with pytest.raises(JournalDamaged, match=rf"offset {positions[2].offset} \(LSN 3\)"):
            segment_table(path, verify=verify)
    path.write_bytes(b"?" + whole[1:])
    with pytest.raises(JournalDamaged, match="header at offset 0"):
        segment_table(path)
    path.write_bytes(b"")
    with pytest.raises(JournalDamaged, match="shorter than"):
        segment_table(path)
