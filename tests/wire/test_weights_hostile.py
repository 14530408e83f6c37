"""Manifests and payloads that are not what they claim: refused, and a half-changed state never serves."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.wire import block
from forebay.wire.errors import WireError
from forebay.wire.v1 import weights_pb2
from forebay.wire.weights import CorruptWeights, Encoded, WeightsError, WrongBase, apply, encode_anchor, encode_delta
from tests.wire.making import NEW, OLD, copy_of, flipped, state_of, tampered

_RANDOM = np.random.default_rng(5)
_BASE = state_of(
    {
        "a": ("BF16", (40, 10), _RANDOM.integers(0, 2**16, 400, np.uint16)),
        "b": ("F32", (30,), _RANDOM.integers(0, 2**32, 30, np.uint32)),
        "c": ("BF16", (150_000,), _RANDOM.integers(0x3C00, 0x3D00, 150_000, np.uint16)),
        "d": ("U8", (), np.array([3], np.uint8)),
    }
)


def _change(name: str, bits: np.ndarray) -> None:
    bits[::3] += 1
    if name == "b":
        bits[:] = bits[::-1].copy()


_NEW = copy_of(_BASE, _change)
_DELTA = encode_delta(_BASE, _NEW, version=NEW, base_version=OLD)
_ANCHOR = encode_anchor(_NEW, version=NEW)
_BOTH = pytest.mark.parametrize("encoded", [_DELTA, _ANCHOR], ids=["delta", "anchor"])


def _fails(encoded: Encoded, payload: bytes) -> bool:
    """True when it was refused; then the state is as before or damaged. False when it came to the right weights."""
    state = copy_of(_BASE)
    before = state.digest()
    try:
        apply(state, encoded.manifest, payload)
    except (CorruptWeights, WrongBase):
        assert state.damaged or state.digest() == before
        return True
    assert state.digest() == _NEW.digest()
    return False


@_BOTH
def test_a_flipped_bit_in_the_payload_is_found_before_anything_is_touched(encoded: Encoded) -> None:
    payload = encoded.payload()
    for bit in _RANDOM.integers(0, 8 * len(payload), 200):
        state = copy_of(_BASE)
        with pytest.raises(CorruptWeights, match="chunk"):
            apply(state, encoded.manifest, flipped(payload, int(bit)))
        assert state.digest() == _BASE.digest()


@_BOTH
def test_a_flipped_bit_in_the_manifest_is_found_or_harmless(encoded: Encoded) -> None:
    """Harmless: a version number, a codec's name. The weights that come out are right or refused."""
    message = encoded.manifest.SerializeToString()
    refused = 0
    for bit in range(0, 8 * len(message), 7):
        try:
            manifest = weights_pb2.Manifest.FromString(flipped(message, bit))
        except DecodeError:
            continue
        refused += _fails(Encoded(manifest=manifest, chunks={}), encoded.payload())
    assert refused > len(message) // 2


@pytest.mark.parametrize("encoded", [_DELTA, _ANCHOR], ids=["delta", "anchor"])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_tampering_that_fixes_the_chunk_digests_is_found(encoded: Encoded, data: st.DataObject) -> None:
    payload = encoded.payload()
    near_heads = [e.offset + i for e in encoded.manifest.tensors for i in range(min(60, e.bytes))]
    at = data.draw(st.one_of(st.integers(0, len(payload) - 1), st.sampled_from(near_heads)))
    evil = tampered(encoded, flipped(payload, 8 * at + data.draw(st.integers(0, 7))))
    _fails(evil, evil.payload())


@_BOTH
def test_a_payload_cut_short_or_too_long_is_refused(encoded: Encoded) -> None:
    payload = encoded.payload()
    for other in (b"", payload[:-1], payload + b"x", payload[: len(payload) // 2]):
        state = copy_of(_BASE)
        with pytest.raises(CorruptWeights):
            apply(state, encoded.manifest, other)
        assert state.digest() == _BASE.digest()


def test_a_failed_update_marks_the_state_until_it_is_reloaded() -> None:
    state = copy_of(_BASE)
    evil = tampered(_DELTA, bytes(len(_DELTA.payload())))
    with pytest.raises(CorruptWeights, match="reload"):
        apply(state, evil.manifest, evil.payload())
    assert state.damaged
    for use in (state.digest, lambda: encode_anchor(state, version=NEW), lambda: copy_of(_BASE).copy_from(state)):
        with pytest.raises(CorruptWeights, match="damaged"):
            use()
    with pytest.raises(CorruptWeights, match="damaged"):
        apply(state, _DELTA.manifest, _DELTA.payload())
    apply(state, _ANCHOR.manifest, _ANCHOR.payload())
    assert not state.damaged
    assert state.digest() == _NEW.digest()


def test_an_anchor_of_some_tensors_is_none() -> None:
    part = encode_anchor(state_of({"d": ("U8", (), np.array([4], np.uint8))}), version=NEW)
    state = copy_of(_BASE)
    with pytest.raises(CorruptWeights, match="1 of 4 tensors"):
        apply(state, part.manifest, part.payload())
    assert state.digest() == _BASE.digest()


def test_a_tensor_may_not_stand_in_for_its_twin() -> None:
    twins = state_of({name: ("U8", (1,), np.array([4], np.uint8)) for name in "xy"})
    anchor = encode_anchor(twins, version=NEW)
    anchor.manifest.tensors[1].name = "x"
    with pytest.raises(CorruptWeights, match="out of order"):
        apply(twins, anchor.manifest, anchor.payload())


def test_a_failed_update_is_mended_by_a_copy() -> None:
    state = copy_of(_BASE)
    evil = tampered(_DELTA, bytes(len(_DELTA.payload())))
    with pytest.raises(CorruptWeights):
        apply(state, evil.manifest, evil.payload())
    state.copy_from(_BASE)
    assert state.digest() == _BASE.digest()


def _lies() -> list[Callable[[weights_pb2.Manifest], None]]:
    def field(name: str, value: object) -> Callable[[weights_pb2.Manifest], None]:
        return lambda manifest: setattr(manifest, name, value)

    def entry(name: str, value: object) -> Callable[[weights_pb2.Manifest], None]:
        return lambda manifest: setattr(manifest.tensors[1], name, value)

    return [
        field("format", 1),
        field("anchor", True),
        field("digest", b""),
        field("digest", bytes(32)),
        field("base_digest", b"short"),
        field("payload_bytes", 1 << 60),
        entry("name", "zzz"),
        entry("name", "a"),
        entry("dtype", "F16"),
        entry("dtype", "pickle"),
        entry("offset", 0),
        entry("bytes", 1 << 62),
        entry("changed", 0),
        entry("changed", 1 << 60),
        entry("digest", bytes(32)),
        entry("digest", b""),
        lambda manifest: manifest.tensors[1].shape.append(1 << 60),
        lambda manifest: manifest.tensors[1].shape.extend([1 << 63] * 100_000),
        lambda manifest: manifest.chunks.add(digest=bytes(32), bytes=0) and None,
        lambda manifest: manifest.chunks.pop() and None,
        lambda manifest: manifest.tensors.pop() and None,
        lambda manifest: manifest.tensors.reverse(),
    ]


@pytest.mark.parametrize("lie", _lies())
def test_a_manifest_that_lies_is_refused(lie: Callable[[weights_pb2.Manifest], None]) -> None:
    manifest = weights_pb2.Manifest()
    manifest.CopyFrom(_DELTA.manifest)
    lie(manifest)
    started_s = time.process_time()
    assert _fails(Encoded(manifest=manifest, chunks={}), _DELTA.payload())
    assert time.process_time() - started_s < 1.0


def _block(kind: int, changed: int, streams: list[bytes]) -> memoryview:
    return memoryview(struct.pack(f"<BI{len(streams)}I", kind, changed, *map(len, streams)) + b"".join(streams))


def _applied(target: np.ndarray, data: memoryview, dtype: str) -> None:
    block.apply_block(target, block.open_block(data, len(target), target.itemsize), dtype)


def _z(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data) if data else b""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (memoryview(b""), "short"),
        (memoryview(b"\x00\x00\x00"), "short"),
        (_block(9, 1, []), "kind 9"),
        (_block(0, 1, []), "kind 0"),
        (_block(1, 0, [b""] * 5), "kind 1"),
        (_block(3, 101, [_z(bytes(100))] * 2), "101 of 100"),
        (_block(3, 100, [_z(bytes(100)), _z(bytes(99))]), "declared 100"),
        (_block(3, 100, [_z(bytes(1 << 20))] * 2), "declared 100"),
        (_block(2, 100, [bytes(20)] * 2), "zstd"),
        (_block(1, 1, [_z(b"\x64"), b"", b"", _z(b"\x01"), b""]), "changed position 100"),
        (_block(1, 1, [_z(b"\xff"), _z(b"\xff"), _z(b"\xff\xff\xff"), _z(b"\x01"), b""]), "changed position"),
        (_block(1, 1, [_z(b"\xff"), b"", b"", _z(b"\x01"), b""]), "nothing where"),
        (_block(1, 1, [_z(b"\x00"), b"", b"", _z(b"\xff"), b""]), "nothing where"),
        (_block(1, 1, [_z(b"\x00"), b"", b"", _z(b"\xff"), _z(b"\x01")]), "declared 2"),
        (_block(1, 1, [_z(b"\x00"), b"", b"", _z(b"\x01"), _z(b"\x01")]), "declared 0"),
    ],
)
def test_blocks_that_are_malformed_are_refused(data: memoryview, message: str) -> None:
    with pytest.raises(WireError, match=message):
        _applied(np.zeros(100, np.uint16), data, "BF16")


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=80), st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]))
def test_noise_is_no_block(noise: bytes, kind: type[np.unsignedinteger]) -> None:
    with pytest.raises(WireError):
        _applied(np.zeros(50, kind), memoryview(b"\x01\x01" + noise), "F32")


def test_every_error_is_a_weights_error() -> None:
    assert issubclass(CorruptWeights, WeightsError)
    assert issubclass(WrongBase, WeightsError)


def test_a_state_that_keeps_its_undo_survives_a_payload_that_goes_wrong() -> None:
    """Every digest on the way is right but that of the last tensor: all before it was applied by then."""
    state, evil = copy_of(_BASE), weights_pb2.Manifest()
    evil.CopyFrom(_DELTA.manifest)
    evil.tensors[-1].digest = bytes(16)
    with pytest.raises(CorruptWeights, match="as before"):
        apply(state, evil, _DELTA.payload(), keep_undo=True)
    assert not state.damaged
    assert state.digest() == _BASE.digest()
    assert state.recheck() == []
    apply(state, _DELTA.manifest, _DELTA.payload())
    assert state.digest() == _NEW.digest()
