"""One block of a tensor: how it differs from its base, in whichever form is smallest.

    block  = kind (u8) changed (u32) length of each stream (u32 each) streams
    stream = one zstd frame, or nothing when it would be empty

| kind    | streams                                                                                   |
|---------|-------------------------------------------------------------------------------------------|
| SAME    | none                                                                                      |
| GAPS    | gaps, low bytes of gap escapes (u32), their upper planes; then ULP steps: a byte each and |
|         | raw escapes for elements of 8 and 16 bits, byte planes for wider ones                     |
| XOR     | byte planes of base XOR new                                                               |
| PLANES  | byte planes of new: needs no base                                                         |
| BITMASK | one bit an element, lowest first; ULP steps                                               |
| CLASSES | a table (below); then as GAPS, class by class, the rest last                              |

The classes are those of `forebay.wire.classes`: of the old values, which both sides know. Their table is the number of
classes (u8), 7 bounds between them (exponents, u16) and how many elements of each of 8 changed (u32), unused ones 0.
Gaps in a class skip its own elements, in the rest all. All integers are little-endian. 255 is the escape of one-byte
streams.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from forebay.wire import bounded_zstd, gaps, planes
from forebay.wire.bytes_like import BytesLike
from forebay.wire.classes import EXPONENTS, MAX_CLASSES
from forebay.wire.dtype import Bits, exponent_shift, is_float
from forebay.wire.errors import WireError
from forebay.wire.fingerprint import NOTHING, Sums, minus
from forebay.wire.loops import ClassDifference, Difference, loops

BLOCK_BYTES = 1 << 23  #: of elements; bounds the working memory of both sides
_LEVEL = 1  #: entropy coding does the work: level 3 was never smaller (measured)
_ALL_FORMS_BELOW = 1 << 14  #: bytes; blocks this small simply try every form
_SAMPLES, _SAMPLE_ELEMENTS = 16, 64
_NEARLY_CONSTANT = 16  #: times smaller: beyond this, samples say too little of what PLANES would take
_WORD_BYTES = 8
_HEAD = struct.Struct("<BI")
_TABLE = struct.Struct("<B7H8I")


class Kind(IntEnum):
    """The form of a block."""

    SAME = 0
    GAPS = 1
    XOR = 2
    PLANES = 3
    BITMASK = 4
    CLASSES = 5


#: Kinds whose payload alone leads back from new to base.
REVERSIBLE = frozenset({Kind.SAME, Kind.GAPS, Kind.XOR, Kind.BITMASK})
_KINDS = tuple(Kind)
#: How many streams say where the changed elements are, of the kinds whose other streams are steps.
_PLACES = {Kind.GAPS: 3, Kind.BITMASK: 1, Kind.CLASSES: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of a tensor, encoded."""

    kind: Kind
    changed: int
    data: bytes
    change: Sums  #: what it adds to the tensor's fingerprint (all of it where there was no base)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A block as it stands in a payload: its head was read, its streams were not."""

    kind: Kind
    changed: int
    streams: Sequence[BytesLike]
    used: int  #: bytes


def encode(base: Bits | None, new: Bits, dtype: str, *, first: int = 0, classes: bool = False) -> Block:
    """The smallest form of `new` [n], given `base` [n] or nothing; with `classes`, CLASSES is tried for floats too.

    `first` is the byte in its tensor at which the block starts, a multiple of 8.
    """
    word = first // _WORD_BYTES
    if base is None:
        data = _dense(Kind.PLANES, new, len(new), is_float(dtype))
        return Block(kind=Kind.PLANES, changed=len(new), data=data, change=fingerprint(new, word))
    found = loops().difference(base, new, is_float=is_float(dtype), first_word=word)
    if not len(found.gaps):
        return Block(kind=Kind.SAME, changed=0, data=_HEAD.pack(Kind.SAME, 0), change=NOTHING)
    forms = _forms(base, new, found, dtype)
    if classes and is_float(dtype):
        forms.append((Kind.CLASSES, _classed(loops().classified(base, found, exponent_shift(dtype)))))
    kind, data = min(forms, key=lambda form: len(form[1]))
    return Block(kind=kind, changed=len(found.gaps), data=data, change=found.change)


def open_block(data: memoryview, elements: int, width: int) -> Opened:
    """Head and streams of the block of `elements` of `width` bytes at the start of `data`. Raises WireError."""
    if len(data) < _HEAD.size:
        raise WireError("block cut short")
    number, changed = _HEAD.unpack_from(data)
    if number >= len(_KINDS) or changed > elements or (changed == 0) != (number == Kind.SAME):
        raise WireError(f"block of kind {number} with {changed} of {elements} elements changed")
    kind = _KINDS[number]
    count = _stream_count(kind, width)
    at = _HEAD.size + 4 * count
    if len(data) < at:
        raise WireError("block cut short")
    streams = []
    for length in struct.unpack_from(f"<{count}I", data, _HEAD.size):
        streams.append(data[at : at + length])
        at += length
    if at > len(data):
        raise WireError("block cut short")
    return Opened(kind=kind, changed=changed, streams=streams, used=at)


def apply_block(target: Bits, opened: Opened, dtype: str, *, first: int = 0, backwards: bool = False) -> Sums:
    """Turn `target` [n] from base to new in place (`backwards`: the other way, for REVERSIBLE kinds only).

    Returns how the tensor's fingerprint changed. Raises WireError; the target may be changed by then.
    """
    word, streams = first // _WORD_BYTES, opened.streams
    if opened.kind in _PLACES:
        steps = _read_steps(streams[_PLACES[opened.kind] :], opened.changed, target.dtype)
        if backwards:
            steps = _turned(steps)
        return _apply_steps(target, opened, steps, dtype, word)
    before = fingerprint(target, word)
    if opened.kind is Kind.XOR:
        np.bitwise_xor(target, _join_dense(streams, target, rotate=False), out=target)
    elif opened.kind is Kind.PLANES:
        target[:] = _join_dense(streams, target, rotate=is_float(dtype))
    return minus(fingerprint(target, word), before)


def read_steps(opened: Opened, elements: int, dtype: np.dtype[np.unsignedinteger]) -> tuple[NDArray[np.int64], Bits]:
    """Positions and zig-zag ULP steps of a GAPS or BITMASK block: a delta without its base. Raises WireError."""
    steps = _read_steps(opened.streams[_PLACES[opened.kind] :], opened.changed, dtype)
    found, escapes = _read_gaps(opened, elements)
    return gaps.decode(found, escapes, elements), steps


def pack_steps(positions: NDArray[np.int64], steps: Bits) -> bytes:
    """The inverse of `read_steps`, as a GAPS block (SAME when nothing changed)."""
    if not len(positions):
        return _HEAD.pack(Kind.SAME, 0)
    found, escapes = gaps.encode(positions)
    return _sparse(found, escapes, steps)


def fingerprint(bits: Bits, word: int) -> Sums:
    """The sums over the block's words."""
    sums: Sums = loops().fingerprint(bits.view(np.uint8), word)
    return sums


def _forms(base: Bits, new: Bits, found: Difference, dtype: str) -> list[tuple[Kind, bytes]]:
    """Forms worth comparing: dense ones cost several times the work, so they are tried only where they could win."""
    changed = len(found.gaps)
    forms = [(Kind.GAPS, _sparse(found.gaps, found.escapes, found.steps))]
    if changed > len(new) // 8:
        mask = np.packbits(base != new, bitorder="little")
        forms.append((Kind.BITMASK, _pack(Kind.BITMASK, changed, [mask, *_step_streams(found.steps)])))
    if changed > len(new) // 4:
        forms.append((Kind.XOR, _dense(Kind.XOR, base ^ new, changed, rotate=False)))
    if _planes_may_win(new, len(forms[0][1]), is_float(dtype)):
        forms.append((Kind.PLANES, _dense(Kind.PLANES, new, changed, is_float(dtype))))
    return forms


def _planes_may_win(new: Bits, sparse_bytes: int, rotate: bool) -> bool:
    """Whether PLANES could be smaller, judged by evenly spread samples: making it costs more than all the rest."""
    if new.nbytes <= _ALL_FORMS_BELOW:
        return True
    step = len(new) // _SAMPLES
    sample = new[: _SAMPLES * step].reshape(_SAMPLES, step)[:, :_SAMPLE_ELEMENTS].ravel()
    sampled_bytes = len(_dense(Kind.PLANES, sample, 0, rotate)) * len(new) // len(sample)
    return sparse_bytes > sampled_bytes // 2 or sampled_bytes < new.nbytes // _NEARLY_CONSTANT


def _sparse(found: NDArray[np.uint8], escapes: NDArray[np.uint32], steps: Bits) -> bytes:
    return _pack(Kind.GAPS, len(found), [found, *_escape_streams(escapes), *_step_streams(steps)])


def _classed(found: ClassDifference) -> bytes:
    short, escapes = gaps.shorten(found.gaps)
    edges = np.cumsum(found.counts)[:-1].tolist()
    streams = [_table(found), short, *_escape_streams(escapes), *_step_streams(found.steps)]
    ends = [(), edges, (), (), edges, ()]
    return _pack(Kind.CLASSES, len(short), streams, ends if found.steps.itemsize <= 2 else ())


def _table(found: ClassDifference) -> NDArray[np.uint8]:
    bounds, counts = found.bounds.tolist(), found.counts.tolist()
    filled = [*bounds, *[0] * (MAX_CLASSES - 1 - len(bounds)), *counts, *[0] * (MAX_CLASSES - len(counts))]
    return np.frombuffer(_TABLE.pack(len(counts), *filled), np.uint8)


def _escape_streams(escapes: NDArray[np.uint32]) -> list[NDArray[np.uint8]]:
    table = escapes.view(np.uint8).reshape(-1, 4)
    return [table[:, 0].copy(), table[:, 1:].T.ravel()]


def _step_streams(zigzag: Bits) -> list[NDArray[np.uint8]]:
    if zigzag.itemsize > 2:
        return planes.split(zigzag, rotate=False)
    short, escaped = loops().short_steps(zigzag)
    return [short, escaped.view(np.uint8)]


def _dense(kind: Kind, bits: Bits, changed: int, rotate: bool) -> bytes:
    return _pack(kind, changed, planes.split(bits, rotate=rotate))


def _pack(kind: Kind, changed: int, streams: Sequence[NDArray[np.uint8]], edges: Sequence[Iterable[int]] = ()) -> bytes:
    ends = edges or [()] * len(streams)
    packed = [bounded_zstd.compress(stream, _LEVEL, own) for stream, own in zip(streams, ends, strict=True)]
    lengths = struct.pack(f"<{len(packed)}I", *map(len, packed))
    return b"".join([_HEAD.pack(kind, changed), lengths, *packed])


def _stream_count(kind: Kind, width: int) -> int:
    if kind in _PLACES:
        return _PLACES[kind] + (width if width > 2 else 2)
    return 0 if kind is Kind.SAME else width


def _apply_steps(target: Bits, opened: Opened, steps: Bits, dtype: str, word: int) -> Sums:
    found, escapes = _read_gaps(opened, len(target))
    if opened.kind is Kind.CLASSES:
        bounds, counts = _read_table(opened)
        classed = ClassDifference(bounds=bounds, counts=counts, gaps=gaps.lengthen(found, escapes), steps=steps)
        sums: Sums = loops().class_advance(target, classed, exponent_shift(dtype), first_word=word)
    else:
        sums = loops().advance(target, found, escapes, steps, is_float=is_float(dtype), first_word=word)
    return sums


def _read_gaps(opened: Opened, elements: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    if opened.kind is Kind.BITMASK:
        mask = _bytes(opened.streams[0], -(-elements // 8))
        return gaps.encode(np.flatnonzero(_set_bits(mask, elements, opened.changed)))
    short, *upper = opened.streams[_PLACES[opened.kind] - 3 : _PLACES[opened.kind]]
    found = _bytes(short, opened.changed)
    return found, _read_escapes(upper, gaps.escapes_in(found))


def _set_bits(mask: NDArray[np.uint8], elements: int, changed: int) -> NDArray[np.uint8]:
    bits = np.unpackbits(mask, bitorder="little")
    if int(np.count_nonzero(bits)) != changed or bits[elements:].any():
        raise WireError(f"a mask that does not mark {changed} of {elements} elements")
    return bits[:elements]


def _read_table(opened: Opened) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(bounds, counts) of the classes."""
    number, *rest = _TABLE.unpack(_bytes(opened.streams[0], _TABLE.size).tobytes())
    bounds, counts = np.array(rest[: max(0, number - 1)]), np.array(rest[MAX_CLASSES - 1 :][:number])
    ascending = bool((np.diff(bounds, prepend=0) > 0).all()) and bool((bounds < EXPONENTS).all())
    if not 1 <= number <= MAX_CLASSES or not ascending or int(counts.sum()) != opened.changed:
        raise WireError(f"a table of {number} classes with {int(counts.sum())} of {opened.changed} changed elements")
    return bounds.astype(np.int64), counts.astype(np.int64)


def _turned(zigzag: Bits) -> Bits:
    """Steps of the same length the other way: zig-zag of -d from that of d."""
    distance = np.bitwise_xor(zigzag >> 1, np.negative(zigzag & 1))
    back = np.negative(distance)
    sign = back >> (8 * zigzag.itemsize - 1)
    turned: Bits = np.bitwise_xor(back << 1, np.negative(sign))
    return turned


def _read_escapes(streams: Sequence[BytesLike], count: int) -> NDArray[np.uint32]:
    table = np.empty((count, 4), np.uint8)
    table[:, 0] = _bytes(streams[0], count)
    table[:, 1:] = _bytes(streams[1], 3 * count).reshape(3, count).T
    return table.reshape(-1).view(np.uint32)


def _read_steps(streams: Sequence[BytesLike], changed: int, dtype: np.dtype[np.unsignedinteger]) -> Bits:
    if dtype.itemsize > 2:
        return planes.join([_bytes(stream, changed) for stream in streams], dtype, rotate=False)
    short = _bytes(streams[0], changed)
    escaped = _bytes(streams[1], gaps.escapes_in(short) * dtype.itemsize).view(dtype)
    zigzag: Bits = loops().long_steps(short, escaped)
    return zigzag


def _join_dense(streams: Sequence[BytesLike], target: Bits, *, rotate: bool) -> Bits:
    return planes.join([_bytes(stream, len(target)) for stream in streams], target.dtype, rotate=rotate)


def _bytes(stream: BytesLike, count: int) -> NDArray[np.uint8]:
    return np.frombuffer(bounded_zstd.decompress(stream, count), np.uint8)
