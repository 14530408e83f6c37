"""Bytes that are not honest frames: refused with FrameError, quickly, and without taking their memory."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
import zstandard
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from forebay.wire import arrow_message, storage
from forebay.wire.experience import FrameError, check_frame, decode_frame
from forebay.wire.frame_header import check_sizes
from forebay.wire.storage import Columns
from forebay.wire.trajectory import VersionSpan
from forebay.wire.v1 import experience_pb2
from forebay.wire.words import WordReader, as_words
from tests.wire.making import NEW, OLD, concatenated, content_of, facts, flipped, frame_of, resealed, trajectory

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


def _bombs() -> dict[str, experience_pb2.Frame]:
    """Small frames that would be huge, up to what a header may declare for so small a payload."""
    payload = _bomb(512 << 20)
    bombs = {f"zstd {declared}": resealed(_FRAME, _CONTENT, payload) for declared in (512 << 20, 4 << 20, 1000)}
    for name, frame in bombs.items():
        frame.header.uncompressed_bytes = int(name.split()[1])
    room = (4 << 20) - 4096
    for column, head in {"words": b"\x01", "tokens": b"\x01", "logprobs": b"", "floats": b""}.items():
        bombs[column] = _rebuilt(**{column: head + bytes(room)})
    bombs["common tokens"] = _rebuilt(tokens=b"\x11\x01\x00" + bytes(room))
    bombs["odd log-probabilities"] = _rebuilt(logprobs=b"\xff" * room)
    bombs["texts"] = _rebuilt(texts=[""] * (room // 4))
    bombs["one text"] = _rebuilt(texts=["x" * room])
    bombs["arrow"] = _arrow_bomb()
    return bombs


def test_a_decompression_bomb_is_refused_within_10_ms_and_32_mb(tmp_path: Path) -> None:
    """In a process of its own, whose time and peak of memory are its own."""
    bombs = _bombs()
    for number, bomb in enumerate([_FRAME, *bombs.values()]):
        assert bomb.ByteSize() < 64 << 10
        (tmp_path / f"{number:03}").write_bytes(bomb.SerializeToString())
    program = (
        "import json, pathlib, resource, sys, time\n"
        "from forebay.wire.experience import FrameError, decode_frame\n"
        "from forebay.wire.v1.experience_pb2 import Frame\n"
        "honest, *bombs = map(pathlib.Path.read_bytes, sorted(pathlib.Path(sys.argv[1]).iterdir()))\n"
        "decode_frame(Frame.FromString(honest))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "def seconds(bomb):\n"
        "    frame, started_s = Frame.FromString(bomb), time.process_time()\n"
        "    try:\n"
        "        decode_frame(frame)\n"
        "    except FrameError:\n"
        "        return time.process_time() - started_s\n"
        "taken_s = [min(seconds(bomb) for _ in range(5)) for bomb in bombs]\n"
        "print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, taken_s]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    grown_kib, taken_s = json.loads(done.stdout)
    assert grown_kib < 32 << 10
    assert max(taken_s) < 0.01, dict(zip(bombs, taken_s, strict=True))


def test_a_small_payload_may_declare_little() -> None:
    """4 MiB, or two hundred times its own size: a reader takes memory for what is declared."""
    check_sizes(1000, 4 << 20)
    check_sizes(1 << 20, 64 << 20)
    for payload_bytes, declared in ((1000, (4 << 20) + 1), (1 << 15, 200 * (1 << 15) + 1), (1 << 20, (64 << 20) + 1)):
        with pytest.raises(FrameError, match="expand"):
            check_sizes(payload_bytes, declared)


def _arrow_bomb() -> experience_pb2.Frame:
    """An Arrow message whose zstd-compressed buffer expands to 64 MiB."""
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(_CONTENT), storage._SCHEMA)
    at = batch.schema.get_field_index("tokens")
    zeros = pa.array([bytes(64 << 20)], pa.binary())
    return resealed(_FRAME, _ipc(batch.set_column(at, batch.schema.field(at), zeros), compression="zstd"))


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


def _rebuilt(**streams: bytes | list[str]) -> experience_pb2.Frame:
    """The frame with other columns: bytes, or the list of texts."""
    origin, columns = storage.unpack(_CONTENT)
    changed = {name: [np.frombuffer(data, np.uint8)] for name, data in streams.items() if isinstance(data, bytes)}
    kept = {name: getattr(columns, name) for name in storage._BYTES}
    texts = streams.get("texts", columns.texts.to_pylist())
    packed = storage.pack(origin, Columns(**{**kept, **changed}, texts=texts))
    return resealed(_FRAME, packed.content)


#: Where the words of `_FRAME` stand: three members of two groups, five spans, four runs, two reward parts.
_PLACES = {
    "members": 0, "lengths": 3, "shared": 6, "alike": 9, "run_counts": 12, "span_counts": 15, "part_counts": 18,
    "finish_reason": 21, "trace": 24, "metadata": 27, "span_starts": 30, "span_incarnations": 35, "span_steps": 40,
    "runs": 45, "part_names": 49, "end": 51,
}  # fmt: skip


def _all_words() -> NDArray[np.int64]:
    _, columns = storage.unpack(_CONTENT)
    return WordReader(columns.words[0]).rows(1, _PLACES["end"]).reshape(-1)


def _reworded(**values: list[int]) -> experience_pb2.Frame:
    """The frame with other words from the named places on."""
    words = _all_words()
    for name, own in values.items():
        words[_PLACES[name] : _PLACES[name] + len(own)] = own
    return _rebuilt(words=concatenated(as_words([words])))


def test_the_words_stand_where_these_tests_take_them_for() -> None:
    words = _all_words().tolist()
    for name, expected in {
        "members": [0, 1, 0],
        "lengths": [4, 4, 4],
        "shared": [0, 4, 0],
        "alike": [0, 4, 0],
        "run_counts": [2, 2, 0],
        "span_counts": [2, 2, 1],
        "part_counts": [1, 1, 0],
        "span_steps": [4, 5, 4, 5, 4],
        "runs": [1, 1, 1, 1],
        "part_names": [0, 1],
    }.items():
        assert words[_PLACES[name] : _PLACES[name] + len(expected)] == expected
    assert facts(decode_frame(_reworded())[0]) == facts(_MEMBERS[0])


_HUGE = 2**32 - 1


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("lengths", [4, 4, 0], "without tokens"),
        ("lengths", [_HUGE] * 3, "tokens"),
        ("lengths", [4, 4, 5], "token ids"),
        ("shared", [1, 4, 0], "shares more"),
        ("shared", [0, 5, 0], "shares more"),
        ("shared", [0, 4, 1], "shares more"),
        ("shared", [0, 3, 0], "token ids"),
        ("alike", [1, 4, 0], "shares more"),
        ("alike", [0, 5, 0], "shares more"),
        ("alike", [0, 4, 1], "shares more"),
        ("alike", [0, 3, 0], "log-probabilities"),
        ("run_counts", [2, 2, _HUGE], "words"),
        ("run_counts", [2, 1, 0], "words"),
        ("runs", [1, 3, 1, 1], "loss mask"),
        ("runs", [_HUGE] * 4, "loss mask"),
        ("span_counts", [0, 2, 1], "words"),
        ("span_counts", [3, 2, 0], "spans"),
        ("span_counts", [_HUGE] * 3, "words"),
        ("span_starts", [1, 2, 0, 2, 0], "spans"),
        ("span_starts", [0, 0, 0, 2, 0], "spans"),
        ("span_starts", [0, 4, 0, 2, 0], "spans"),
        ("span_starts", [0, 2, 0, 2, 1], "spans"),
        ("span_steps", [4, 6, 4, 5, 4], "header"),
        ("part_counts", [2, 0, 1], "words"),
        ("part_counts", [2, 0, 0], "named twice"),
        ("part_counts", [_HUGE] * 3, "words"),
        ("part_names", [1, 0], "has not been there"),
        ("part_names", [0, 0], "texts"),
        ("finish_reason", [0, 2, 1], "has not been there"),
        ("metadata", [0, 0, 1], "texts"),
        ("members", [1, 1, 0], "twice"),
    ],
)
def test_words_that_do_not_fit_each_other_are_refused(name: str, values: list[int], message: str) -> None:
    _refused(_reworded(**{name: values}), message)


@pytest.mark.parametrize(
    ("column", "content", "message"),
    [
        ("words", b"", "words"),
        ("words", b"\x00", "words"),
        ("words", b"\x05" + bytes(5 * 51), "words"),
        ("words", b"\x02" + bytes(51), "words"),
        ("words", concatenated(as_words([np.append(_all_words(), 0)])), "words"),
        ("tokens", b"", "token ids"),
        ("tokens", b"\x00", "form"),
        ("tokens", b"\x05" + bytes(14), "form"),
        ("tokens", b"\x01" + bytes(13), "token ids"),
        ("tokens", b"\x01" + bytes(15), "token ids"),
        ("tokens", b"\x11", "token ids"),
        ("tokens", b"\x11\x00" + bytes(14), "token ids"),
        ("tokens", b"\x11\x01\x07" + bytes(13), "token ids"),
        ("tokens", b"\x11\x01\x07" + bytes(15), "planes"),
        ("tokens", b"\x11\x01\x07" + bytes(13) + b"\xff", "planes"),
        ("logprobs", b"", "log-probabilities"),
        ("logprobs", bytes(7), "log-probabilities"),
        ("logprobs", bytes(8), "log-probabilities"),
        ("logprobs", bytes(25), "log-probabilities"),
        ("logprobs", b"\x80" * 24, "log-probabilities"),
        ("logprobs", b"\xff" * 33, "log-probabilities"),
        ("floats", b"", "planes"),
        ("floats", bytes(16), "planes"),
        ("floats", bytes(9 * 17), "planes"),
        ("texts", ["stop", "", "{}"], "texts"),
        ("texts", ["stop", "", "{}", "a", "b"], "texts"),
    ],
)
def test_columns_that_do_not_fit_their_words_are_refused(column: str, content: bytes | list[str], message: str) -> None:
    _refused(_rebuilt(**{column: content}), message)


def test_a_payload_under_another_header_is_refused() -> None:
    origin, columns = storage.unpack(_CONTENT)
    columns = replace(columns, texts=columns.texts.to_pylist())
    assert facts(decode_frame(resealed(_FRAME, storage.pack(origin, columns).content))[0]) == facts(_MEMBERS[0])
    _refused(resealed(_FRAME, storage.pack(origin + 1, columns).content), "another header")


def test_codes_of_compact_log_probabilities_are_checked() -> None:
    frame = frame_of(_MEMBERS, codec="zstd+compact")
    origin, columns = storage.unpack(content_of(frame))
    for content, message in (
        (bytes(3), "compact"),
        (bytes(7), "compact"),
        (bytes(9), "planes"),
        (b"\x01\x00\x00\x7f" + bytes(4), "offset"),
        (bytes(4) + b"\xff\x00\x00\x00", "planes"),
    ):
        changed = replace(columns, logprobs=[np.frombuffer(content, np.uint8)], texts=columns.texts.to_pylist())
        _refused(resealed(frame, storage.pack(origin, changed).content), message)


def test_a_long_chain_of_sharing_members_is_followed_fast() -> None:
    """Every member has its one token from the one before it, thousands of times over."""
    members = [
        trajectory(member=m, tokens=np.zeros(1, np.int32), logprobs=np.zeros(1, np.float32)) for m in range(8192)
    ]
    frame = frame_of(members)
    started_s = time.process_time()
    assert len(decode_frame(frame)) == 8192
    assert time.process_time() - started_s < 5.0  # 0.4 alone, 1.2 late in the suite; all pairs would take far longer


def test_nulls_and_bad_offsets_are_refused() -> None:
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(_CONTENT), storage._SCHEMA)
    at = batch.schema.get_field_index("floats")
    field = batch.schema.field(at)
    for offsets in ([0, 1 << 30], [-5, 3], [3, 0]):
        memory = np.array([0, 3], np.int32)
        column = pa.Array.from_buffers(field.type, 1, [None, pa.py_buffer(memory), pa.py_buffer(bytes(3))])
        memory[:] = offsets  # behind the back of Arrow, which would not make such an array
        _refused(resealed(_FRAME, arrow_message.write(batch.set_column(at, field, column))), "Arrow|null")
    _refused(resealed(_FRAME, arrow_message.write(batch.set_column(at, field, pa.array([None], field.type)))), "null")
    at = batch.schema.get_field_index("texts")
    field = batch.schema.field(at)
    for column in (pa.array([None], field.type), pa.array([["stop", None, "{}", "a"]], field.type)):
        _refused(resealed(_FRAME, arrow_message.write(batch.set_column(at, field, column))), "null")


def test_texts_that_are_no_unicode_are_refused() -> None:
    damaged = _CONTENT.replace(b"stop", b"st\xffp")
    assert damaged != _CONTENT
    _refused(resealed(_FRAME, damaged), "Arrow")


def test_zstd_frames_that_ask_for_more_are_refused() -> None:
    wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=24)
    content = np.random.default_rng(0).bytes(1 << 17) + bytes(12 << 20)
    payload = zstandard.ZstdCompressor(compression_params=wide).compress(content)
    _refused(resealed(_FRAME, content, payload=payload), "window")
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(_CONTENT)
    _refused(resealed(_FRAME, _CONTENT, payload=silent), "content size")
    _refused(resealed(_FRAME, _CONTENT, payload=_FRAME.payload + b"more"))
    _refused(resealed(_FRAME, _CONTENT, payload=_FRAME.payload * 2))
