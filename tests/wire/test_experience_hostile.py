"""Bytes that are not honest frames: refused with FrameError, quickly, and without taking their memory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
import zstandard
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.wire import arrow_message, storage
from forebay.wire.experience import FrameError, check_frame, decode_frame
from forebay.wire.trajectory import VersionSpan
from forebay.wire.v1 import experience_pb2
from tests.wire.making import NEW, OLD, content_of, facts, flipped, frame_of, resealed, trajectory

_SPANS = (VersionSpan(start=0, version=OLD), VersionSpan(start=2, version=NEW))
_MASK = np.array([True, False, True, True])
_MEMBERS = [trajectory(member=m, spans=_SPANS, loss_mask=_MASK, reward_parts={"a": 1.0}) for m in range(2)]
_FRAME = frame_of([*_MEMBERS, trajectory(group_id=2)])
_CONTENT = content_of(_FRAME)
_BYTES = _FRAME.SerializeToString()


def _refused(frame: experience_pb2.Frame, match: str | None = None) -> None:
    with pytest.raises(FrameError, match=match):
        decode_frame(frame)


def test_a_flipped_bit_anywhere_is_found() -> None:
    for bit in range(0, 8 * len(_BYTES), 3):
        try:
            frame = experience_pb2.Frame.FromString(flipped(_BYTES, bit))
        except DecodeError:
            continue
        _refused(frame)


def test_a_frame_cut_short_anywhere_is_found() -> None:
    for size in range(len(_FRAME.payload)):
        frame = resealed(_FRAME, _CONTENT, payload=_FRAME.payload[:size])
        _refused(frame)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 8 * len(_CONTENT) - 1))
def test_tampered_content_is_refused_or_well_formed(bit: int) -> None:
    """The sender may lie about a reward; it may not make the reader fail in any other way."""
    try:
        members = decode_frame(resealed(_FRAME, flipped(_CONTENT, bit)))
    except FrameError:
        return
    assert [len(member.tokens) for member in members] == [4, 4, 4]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    _refused(resealed(_FRAME, noise or b"x"))
    _refused(resealed(_FRAME, _CONTENT, payload=noise))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(_CONTENT)), st.binary(min_size=1, max_size=16))
def test_spliced_content_is_refused_or_well_formed(at: int, piece: bytes) -> None:
    content = _CONTENT[:at] + piece + _CONTENT[at + len(piece) :]
    with contextlib.suppress(FrameError):
        assert len(decode_frame(resealed(_FRAME, content))) == 3


def _header_changes() -> list[Callable[[experience_pb2.FrameHeader], None]]:
    def change(path: str, value: object) -> Callable[[experience_pb2.FrameHeader], None]:
        def apply(header: experience_pb2.FrameHeader) -> None:
            target = header.groups[0] if path.startswith("group.") else header
            setattr(target, path.removeprefix("group."), value)

        return apply

    return [
        change("schema_version", 2),
        change("codec", "zstd+compact"),
        change("codec", "pickle"),
        change("run", "another"),
        change("fleet", "x" * 257),
        change("sequence", 8),
        change("incarnation", 3),
        change("payload_bytes", 1),
        change("uncompressed_bytes", 0),
        change("uncompressed_bytes", 1 << 40),
        change("uncompressed_bytes", len(_CONTENT) + 1),
        change("payload_xxh3", 1),
        change("group.group_id", 2),
        change("group.group_id", 77),
        change("group.attempt", 0),
        change("group.attempt", 9),
        change("group.members", 0),
        change("group.members", 1),
        change("group.members", 1 << 30),
        change("group.prompt_tokens", 1 << 40),
        change("group.generated_tokens", 7),
        change("group.generated_tokens", 1 << 40),
        lambda header: header.groups[0].oldest.CopyFrom(NEW.to_proto()),
        lambda header: header.groups[0].newest.CopyFrom(OLD.to_proto()),
        lambda header: header.groups.pop() and None,
        lambda header: header.ClearField("groups"),
    ]


@pytest.mark.parametrize("change", _header_changes())
def test_a_header_that_lies_is_found(change: Callable[[experience_pb2.FrameHeader], None]) -> None:
    frame = experience_pb2.Frame.FromString(_BYTES)
    change(frame.header)
    _refused(frame)


def test_a_frame_above_the_cap_is_refused_unread() -> None:
    frame = experience_pb2.Frame(header=_FRAME.header, payload=bytes((8 << 20) + 1))
    with pytest.raises(FrameError, match="at most"):
        check_frame(frame)


def _bomb(size: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    piece = bytes(1 << 20)
    return b"".join(compressor.compress(piece) for _ in range(size >> 20)) + compressor.flush()


@pytest.mark.parametrize("declared", [512 << 20, 64 << 20, 16 << 20, 1000])
def test_a_zstd_bomb_is_refused_fast(declared: int) -> None:
    payload = _bomb(512 << 20)
    frame = resealed(_FRAME, _CONTENT, payload=payload)
    frame.header.uncompressed_bytes = declared
    started_s = time.process_time()
    _refused(frame)
    assert time.process_time() - started_s < 0.1


def test_a_bomb_takes_no_memory() -> None:
    """In a process of its own, whose peak is its own."""
    program = (
        "import resource\n"
        "from tests.wire import test_experience_hostile as hostile\n"
        "frame = hostile.resealed(hostile._FRAME, hostile._CONTENT, payload=hostile._bomb(512 << 20))\n"
        "hostile._refused(hostile._arrow_bomb())\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for declared in (512 << 20, 1000):\n"
        "    frame.header.uncompressed_bytes = declared\n"
        "    hostile._refused(frame)\n"
        "hostile._refused(hostile._arrow_bomb())\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 << 10  # KiB


def _arrow_bomb() -> experience_pb2.Frame:
    """An Arrow message whose zstd-compressed buffer expands to 64 MiB."""
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(_CONTENT), storage._SCHEMA)
    planes = pa.ListArray.from_arrays(pa.array([0, 64 << 20], pa.int32()), pa.array(np.zeros(64 << 20, np.uint8)))
    at = batch.schema.get_field_index("token_planes")
    return resealed(_FRAME, _ipc(batch.set_column(at, batch.schema.field(at), planes), compression="zstd"))


def _ipc(batch: pa.RecordBatch, **options: object) -> bytes:
    """The record-batch message of an IPC stream, without its schema message."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    stream = pa.BufferReader(sink.getvalue())
    schema_message = pa.ipc.read_message(stream)
    assert schema_message.type == "schema"
    content: bytes = sink.getvalue().to_pybytes()[stream.tell() :]
    message = pa.ipc.read_message(content)
    return content[: 8 + message.metadata.size + message.body.size]


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compression_inside_arrow_is_refused_before_it_is_expanded(
    compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(_CONTENT), storage._SCHEMA)
    assert facts(decode_frame(resealed(_FRAME, _ipc(batch)))[0]) == facts(_MEMBERS[0])
    hidden = resealed(_FRAME, _ipc(batch, compression=compression))
    monkeypatch.setattr(pa.ipc, "read_record_batch", lambda *_: pytest.fail("the body was looked at"))
    _refused(hidden, "compressed inside")


def test_old_arrow_metadata_is_refused() -> None:
    """Metadata version 4 has a second, undocumented place for a compression codec."""
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(_CONTENT), storage._SCHEMA)
    _refused(resealed(_FRAME, _ipc(batch, metadata_version=pa.ipc.MetadataVersion.V4)), "metadata")


def test_other_arrow_messages_are_refused() -> None:
    extended = pa.schema([pa.field("x", pa.uuid())], metadata={"ARROW:extension:name": "arrow.py_extension_type"})
    _refused(resealed(_FRAME, extended.serialize().to_pybytes()), "schema")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, extended):
        pass
    _refused(resealed(_FRAME, sink.getvalue().to_pybytes()), "schema")
    _refused(resealed(_FRAME, _CONTENT + bytes(64)), "followed by")


def _rebuilt(**columns: object) -> experience_pb2.Frame:
    return resealed(_FRAME, storage.pack({**storage.unpack(_CONTENT), **columns}))


_U4 = np.uint32


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("group_ids", np.array([1], np.uint64)),
        ("group_members", np.array([3, 0], _U4)),
        ("group_members", np.array([2, 2], _U4)),
        ("attempts", np.array([1], _U4)),
        ("prompt_lengths", np.array([2**32 - 1, 2**32 - 1], _U4)),
        ("prompt_lengths", np.array([3, 4], _U4)),
        ("lengths", np.array([4, 4, 0], _U4)),
        ("lengths", np.array([2**32 - 1] * 3, _U4)),
        ("lengths", np.array([4, 4], _U4)),
        ("shared", np.array([1, 4, 0], _U4)),
        ("shared", np.array([0, 5, 0], _U4)),
        ("shared", np.array([0, 4, 1], _U4)),
        ("token_planes", np.zeros(3, np.uint8)),
        ("token_planes", np.zeros(0, np.uint8)),
        ("logprob_planes", np.zeros(12, np.uint8)),
        ("logprob_offset", np.array([0, 0], np.int64)),
        ("run_counts", np.array([2, 2, 2**32 - 1], _U4)),
        ("runs", np.array([1, 3, 1, 1], _U4)),
        ("runs", np.array([2**32 - 1] * 4, _U4)),
        ("span_counts", np.array([0, 2, 1], _U4)),
        ("span_starts", np.array([1, 2, 0, 2, 0], _U4)),
        ("span_starts", np.array([0, 0, 0, 2, 0], _U4)),
        ("span_starts", np.array([0, 4, 0, 2, 0], _U4)),
        ("span_steps", np.array([4, 6, 4, 5, 4], _U4)),
        ("part_counts", np.array([2, 0, 1], _U4)),
        ("part_counts", np.array([2, 0, 0], _U4)),  # names "a" twice for one member
        ("part_names", ["a", "a", "a"]),
        ("members", np.array([0, 1], _U4)),
        ("reward", np.zeros(2)),
        ("metadata", ["{}"] * 4),
        ("origin", ["run", "s1", "edge", "eu"]),
        ("origin_numbers", np.array([2, 8], np.uint64)),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(name: str, values: object) -> None:
    _refused(_rebuilt(**{name: values}))


@pytest.mark.parametrize("shared", [[0, 4, 1], [1, 4, 0], [0, 5, 0]])
def test_nothing_is_shared_beyond_a_group_or_a_length(shared: list[int]) -> None:
    """The planes fit what is then left to store: only the rule about sharing is broken."""
    stored = 6 + max(0, 12 - sum(shared))  # two prompts of three tokens
    _refused(_rebuilt(shared=np.array(shared, _U4), token_planes=np.zeros(stored, np.uint8)), "shares more")


def test_members_that_are_there_twice_are_refused() -> None:
    _refused(_rebuilt(members=np.array([1, 1, 0], _U4)), "twice")


def test_nulls_and_bad_offsets_are_refused() -> None:
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(_CONTENT), storage._SCHEMA)
    at = batch.schema.get_field_index("reward")
    field = batch.schema.field(at)
    for offsets in ([0, 1 << 30], [-5, 3], [3, 0]):
        memory = np.array([0, 3], np.int32)
        column = pa.Array.from_buffers(field.type, 1, [None, pa.py_buffer(memory)], children=[pa.array(np.zeros(3))])
        memory[:] = offsets  # behind the back of Arrow, which would not make such an array
        _refused(resealed(_FRAME, arrow_message.write(batch.set_column(at, field, column))))
    for column in (pa.array([None], field.type), pa.array([[1.0, None, 2.0]], field.type)):
        _refused(resealed(_FRAME, arrow_message.write(batch.set_column(at, field, column))), "null")


def test_zstd_frames_that_ask_for_more_are_refused() -> None:
    wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=24)
    content = bytes(12 << 20)
    payload = zstandard.ZstdCompressor(compression_params=wide).compress(content)
    _refused(resealed(_FRAME, content, payload=payload), "window")
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(_CONTENT)
    _refused(resealed(_FRAME, _CONTENT, payload=silent), "content size")
    _refused(resealed(_FRAME, _CONTENT, payload=_FRAME.payload + b"more"))
    _refused(resealed(_FRAME, _CONTENT, payload=_FRAME.payload * 2))
