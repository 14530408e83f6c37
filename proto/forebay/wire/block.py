"""One block of a tensor: how it differs from its base, in whichever form is smallest.

    block  = kind (u8) changed (u32) length of each stream (u32 each) streams
    stream = one zstd frame, or nothing when it would be empty

| kind   | streams                                                                                   |
|--------|-------------------------------------------------------------------------------------------|
| SAME   | none                                                                                      |
| GAPS   | gaps, low bytes of gap escapes (u32), their upper planes; then ULP steps: a byte each and |
|        | raw escapes for elements of 8 and 16 bits, byte planes for wider ones                     |
| XOR    | byte planes of base XOR new                                                               |
| PLANES | byte planes of new: needs no base                                                         |

All integers are little-endian. 255 is the escape of one-byte streams.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from forebay.wire import bounded_zstd, gaps, planes, ulp
from forebay.wire.bytes_like import BytesLike
from forebay.wire.dtype import Bits
from forebay.wire.errors import WireError

BLOCK_BYTES = 1 << 23  #: of elements; bounds the working memory of both sides
_LEVEL = 1  #: entropy coding does the work: level 3 was never smaller (measured)
_STEP_ESCAPE = 255
_ALL_FORMS_BELOW = 1 << 18  #: bytes; blocks this small simply try every form
_SAMPLES = 16
_HEAD = struct.Struct("<BI")


class Kind(IntEnum):
    """The form of a block."""

    SAME = 0
    GAPS = 1
    XOR = 2
    PLANES = 3


def encode(base: Bits | None, new: Bits, *, is_float: bool) -> tuple[Kind, int, bytes]:
    """The smallest form of `new` [n], given `base` [n] or nothing: (kind, elements changed, bytes)."""
    if base is None:
        return Kind.PLANES, len(new), _dense(Kind.PLANES, new, len(new), is_float)
    positions = _changed_positions(base, new)
    if not len(positions):
        return Kind.SAME, 0, _HEAD.pack(Kind.SAME, 0)
    kind, packed = min(_forms(base, new, positions, is_float), key=lambda form: len(form[1]))
    return kind, len(positions), packed


def decode_into(target: Bits, data: memoryview, *, is_float: bool) -> tuple[Kind, int, int]:
    """Turn `target` [n] from base to new in place: (kind, elements changed, bytes of `data` used). Raises WireError."""
    kind, changed, streams, used = _open(data, target)
    if kind is Kind.GAPS:
        _apply_gaps(target, changed, streams, is_float)
    elif kind is Kind.XOR:
        np.bitwise_xor(target, _join_dense(streams, target, rotate=False), out=target)
    elif kind is Kind.PLANES:
        target[:] = _join_dense(streams, target, rotate=is_float)
    return kind, changed, used


def _changed_positions(base: Bits, new: Bits) -> NDArray[np.int64]:
    """Compares integers: as floats, -0.0 would equal 0.0 and NaN would differ from itself."""
    return np.flatnonzero(base != new)


def _forms(base: Bits, new: Bits, positions: NDArray[np.int64], is_float: bool) -> list[tuple[Kind, bytes]]:
    """Forms worth comparing: dense ones cost several times the work, so they are tried only where they could win."""
    changed = len(positions)
    forms = [(Kind.GAPS, _sparse(base, new, positions, is_float))]
    if changed > len(new) // 4 or new.nbytes <= _ALL_FORMS_BELOW:
        forms.append((Kind.XOR, _dense(Kind.XOR, base ^ new, changed, rotate=False)))
    if new.nbytes <= _ALL_FORMS_BELOW or len(forms[0][1]) > _sampled_bytes(new, is_float) // 2:
        forms.append((Kind.PLANES, _dense(Kind.PLANES, new, changed, is_float)))
    return forms


def _sampled_bytes(new: Bits, is_float: bool) -> int:
    """About what PLANES would take, from evenly spread samples of 1/64 of the block."""
    window = len(new) // (64 * _SAMPLES)
    starts = np.linspace(0, len(new) - window, _SAMPLES).astype(np.int64)
    index = (starts[:, None] + np.arange(window)).ravel()
    return len(_dense(Kind.PLANES, new[index], 0, is_float)) * len(new) // len(index)


def _sparse(base: Bits, new: Bits, positions: NDArray[np.int64], is_float: bool) -> bytes:
    gap_bytes, gap_escapes = gaps.encode(positions)
    zigzag = ulp.steps(base[positions], new[positions], is_float=is_float)
    low, *upper = planes.split(gap_escapes, rotate=False)
    streams = [gap_bytes, low, np.concatenate(upper), *_step_streams(zigzag)]
    return _pack(Kind.GAPS, len(positions), streams)


def _step_streams(zigzag: Bits) -> list[NDArray[np.uint8]]:
    if zigzag.itemsize > 2:
        return planes.split(zigzag, rotate=False)
    escaped = zigzag[zigzag >= _STEP_ESCAPE]
    return [np.minimum(zigzag, _STEP_ESCAPE).astype(np.uint8), escaped.view(np.uint8)]


def _dense(kind: Kind, bits: Bits, changed: int, rotate: bool) -> bytes:
    return _pack(kind, changed, planes.split(bits, rotate=rotate))


def _pack(kind: Kind, changed: int, streams: Sequence[NDArray[np.uint8]]) -> bytes:
    packed = [bounded_zstd.compress(stream, _LEVEL) for stream in streams]
    lengths = struct.pack(f"<{len(packed)}I", *map(len, packed))
    return b"".join([_HEAD.pack(kind, changed), lengths, *packed])


def _open(data: memoryview, target: Bits) -> tuple[Kind, int, list[memoryview], int]:
    """Head and streams of the block at the start of `data`, every length inside it."""
    if len(data) < _HEAD.size:
        raise WireError("block cut short")
    number, changed = _HEAD.unpack_from(data)
    if number > max(Kind) or changed > len(target) or (changed == 0) != (number == Kind.SAME):
        raise WireError(f"block of kind {number} with {changed} of {len(target)} elements changed")
    count = _stream_count(Kind(number), target.itemsize)
    at = _HEAD.size + 4 * count
    if len(data) < at:
        raise WireError("block cut short")
    streams = []
    for length in struct.unpack_from(f"<{count}I", data, _HEAD.size):
        streams.append(data[at : at + length])
        at += length
    if at > len(data):
        raise WireError("block cut short")
    return Kind(number), changed, streams, at


def _stream_count(kind: Kind, width: int) -> int:
    sparse = 3 + (width if width > 2 else 2)
    return {Kind.SAME: 0, Kind.GAPS: sparse, Kind.XOR: width, Kind.PLANES: width}[kind]


def _apply_gaps(target: Bits, changed: int, streams: Sequence[BytesLike], is_float: bool) -> None:
    gap_bytes = _bytes(streams[0], changed)
    positions = gaps.decode(gap_bytes, _read_escapes(streams[1:3], gaps.escapes_in(gap_bytes)), len(target))
    zigzag = _read_steps(streams[3:], changed, target.dtype)
    target[positions] = ulp.advance(target[positions], zigzag, is_float=is_float)


def _read_escapes(streams: Sequence[BytesLike], count: int) -> NDArray[np.uint32]:
    table = [_bytes(streams[0], count), *_bytes(streams[1], 3 * count).reshape(3, count)]
    return planes.join(table, np.dtype("<u4"), rotate=False).view(np.uint32)


def _read_steps(streams: Sequence[BytesLike], changed: int, dtype: np.dtype[np.unsignedinteger]) -> Bits:
    if dtype.itemsize > 2:
        return planes.join([_bytes(stream, changed) for stream in streams], dtype, rotate=False)
    short = _bytes(streams[0], changed)
    escaped = short == _STEP_ESCAPE
    zigzag = short.astype(dtype)
    zigzag[escaped] = _bytes(streams[1], int(np.count_nonzero(escaped)) * dtype.itemsize).view(dtype)
    return zigzag


def _join_dense(streams: Sequence[BytesLike], target: Bits, *, rotate: bool) -> Bits:
    return planes.join([_bytes(stream, len(target)) for stream in streams], target.dtype, rotate=rotate)


def _bytes(stream: BytesLike, count: int) -> NDArray[np.uint8]:
    return np.frombuffer(bounded_zstd.decompress(stream, count), np.uint8)
