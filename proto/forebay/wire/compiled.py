"""The inner loops over weights, compiled by numba: the same results as `forebay.wire.plain`, bit for bit.

They hold no lock of the interpreter. Machine code is cached beside this file, or in the user's cache where that
folder cannot be written. Elements are unsigned integers of 1, 2, 4 or 8 bytes; arithmetic is done in 64 bits and cut.
"""

from __future__ import annotations

# What happens in a loop is typed by numba.
# mypy: disable-error-code=assignment
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from forebay.wire import classes
from forebay.wire.dtype import Bits
from forebay.wire.fingerprint import MIXERS, Sums
from forebay.wire.loops import ClassDifference, Difference, outside

_LINE_BYTES = 64
_ESCAPE = 255
_AHEAD = 32  #: changes
_A, _B, _C, _D, _E = (np.uint64(mixer) for mixer in MIXERS)
_U0, _U1, _U29, _U32 = np.uint64(0), np.uint64(1), np.uint64(29), np.uint64(32)
_NEVER = np.int64(1) << np.int64(62)


def difference(base: Bits, new: Bits, *, is_float: bool, first_word: int) -> Difference:
    """See `forebay.wire.plain.difference`."""
    gaps, steps = np.empty(len(new), np.uint8), np.empty(len(new), new.dtype)
    escapes = np.empty(len(new) // _ESCAPE + 1, np.uint32)
    changed, escaped, *sums = _difference(
        base, new, is_float, np.uint64(first_word), _word_shift(base), gaps, escapes, steps
    )
    return Difference(gaps=gaps[:changed], escapes=escapes[:escaped], steps=steps[:changed], change=_sums(*sums))


def advance(
    target: Bits,
    gaps: NDArray[np.uint8],
    escapes: NDArray[np.uint32],
    steps: Bits,
    *,
    is_float: bool,
    first_word: int,
) -> Sums:
    """See `forebay.wire.plain.advance`."""
    positions = np.empty(len(gaps), np.uint32)
    reached = _positions(gaps, escapes, positions)
    if reached >= len(target):
        raise outside(reached, len(target))
    return _sums(*_advance(target, positions, steps, is_float, np.uint64(first_word), _word_shift(target)))


def fingerprint(content: NDArray[np.uint8], first_word: int) -> Sums:
    """See `forebay.wire.plain.fingerprint`."""
    whole = len(content) & ~7
    tail = int.from_bytes(content[whole:].tobytes(), "little")
    return _sums(*_fingerprint(content[:whole], np.uint64(first_word), np.uint64(tail), whole < len(content)))


def classified(base: Bits, found: Difference, shift: int) -> ClassDifference:
    """See `forebay.wire.plain.classified`."""
    positions = np.empty(len(found.gaps), np.uint32)
    _positions(found.gaps, found.escapes, positions)
    changed, present = np.zeros(classes.EXPONENTS, np.int64), np.zeros(classes.EXPONENTS, np.int64)
    _survey(base, positions, np.uint64(shift), _word_shift(base), classes.stride(len(base)), changed, present)
    bounds = _cut(changed, present, classes.LOGS)
    counts = np.add.reduceat(changed, np.concatenate([[0], bounds])) if len(bounds) else changed.sum(keepdims=True)
    gaps, steps = np.empty(len(positions), np.uint32), np.empty(len(positions), base.dtype)
    limits = bounds.astype(np.uint64) << np.uint64(shift)
    _classified(base, positions, found.steps, limits, _word_shift(base), np.cumsum(counts) - counts, gaps, steps)
    return ClassDifference(bounds=bounds, counts=counts, gaps=gaps, steps=steps)


def class_advance(target: Bits, found: ClassDifference, shift: int, *, first_word: int) -> Sums:
    """See `forebay.wire.plain.class_advance`."""
    limits = found.bounds.astype(np.uint64) << np.uint64(shift)
    left, *sums = _class_advance(
        target, limits, found.counts.copy(), found.gaps, found.steps, np.uint64(first_word), _word_shift(target)
    )
    if left:
        raise outside(len(target), len(target))
    return _sums(*sums)


def _sums(first: Any, second: Any) -> Sums:
    return int(first), int(second)


def _word_shift(bits: Bits) -> int:
    """log2 of the elements in a word: inside the loops a division by an array's `itemsize` is a real one."""
    return 4 - bits.itemsize.bit_length()


def _loaded_line(context: Any, builder: Any, array_type: Any, array: Any, line: Any) -> Any:
    """Code that loads 64 bytes of an array, wherever they lie, as a vector of its elements."""
    from llvmlite import ir

    width = array_type.dtype.bitwidth
    vector = ir.VectorType(ir.IntType(width), 8 * _LINE_BYTES // width)
    data = context.make_array(array_type)(context, builder, array).data
    return builder.load(builder.gep(builder.bitcast(data, vector.as_pointer()), [line]), align=1)


def _as_mask(builder: Any, truths: Any) -> Any:
    """Code that makes 64 bits of a vector of truth values, the first one lowest."""
    from llvmlite import ir

    mask = builder.bitcast(truths, ir.IntType(truths.type.count))
    return builder.zext(mask, ir.IntType(64)) if truths.type.count < 64 else mask


@intrinsic  # type: ignore[untyped-decorator]
def _line_mask(typing_context: Any, base: Any, new: Any, line: Any) -> Any:
    """Bit k: element k of the 64-byte line differs. One comparison of vectors where the machine has such."""
    signature = types.uint64(base, new, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lines = [
            _loaded_line(context, builder, array_type, array, arguments[2])
            for array_type, array in zip(signature.args[:2], arguments[:2], strict=True)
        ]
        return _as_mask(builder, builder.icmp_unsigned("!=", *lines))

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def _line_below(typing_context: Any, bits: Any, line: Any, limit: Any) -> Any:
    """Bit k: element k of the 64-byte line is smaller than `limit`, signs left out."""
    signature = types.uint64(bits, types.intp, types.uint64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        line = _loaded_line(context, builder, signature.args[0], arguments[0], arguments[1])
        width, lanes, vector = line.type.element.width, line.type.count, line.type
        element = vector.element
        magnitudes = builder.and_(line, ir.Constant(vector, [(1 << (width - 1)) - 1] * lanes))
        bound = arguments[2] if width == 64 else builder.trunc(arguments[2], element)
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), bound, ir.Constant(ir.IntType(32), 0))
        picks = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        below = builder.icmp_unsigned("<", magnitudes, builder.shuffle_vector(one, one, picks))
        return _as_mask(builder, below)

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def _load_word(typing_context: Any, bits: Any, word: Any) -> Any:
    """The 8 bytes at 8 * word, wherever they lie."""
    signature = types.uint64(bits, types.uint64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.gep(builder.bitcast(data, ir.IntType(64).as_pointer()), [arguments[1]])
        return builder.load(pointer, align=1)

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def _lowest(typing_context: Any, mask: Any) -> Any:
    """Index of the lowest bit that is set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _ones(typing_context: Any, mask: Any) -> Any:
    """How many bits are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing_context: Any, bits: Any, at: Any) -> Any:
    """Ask for the line of an element that will be changed soon: they lie too far apart for the machine to guess."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], function)
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(prefetch, [address, *(ir.Constant(number, value) for value in (1, 3, 1))])
        return context.get_dummy_value()

    return types.void(bits, types.intp), generate


_inline = njit(nogil=True, cache=True, inline="always", error_model="numpy")
_compile = njit(nogil=True, cache=True, error_model="numpy")


_cut: Any = _compile(classes.cut)


@_inline  # type: ignore[untyped-decorator]
def _mixed(key: Any, value: Any) -> Any:
    x = (value ^ key) * _C
    return x ^ (x >> _U32)


@_inline  # type: ignore[untyped-decorator]
def _first_of(mixed: Any) -> Any:
    return mixed * _D


@_inline  # type: ignore[untyped-decorator]
def _second_of(mixed: Any) -> Any:
    return (mixed ^ (mixed >> _U29)) * _E


@_inline  # type: ignore[untyped-decorator]
def _key(word: Any) -> Any:
    return word * _A + _B


@_inline  # type: ignore[untyped-decorator]
def _word_at(bits: Any, word: Any, word_shift: Any) -> Any:
    """The word, or what there is of the last one."""
    start = word << word_shift
    if start + (1 << word_shift) <= len(bits):
        return _load_word(bits, np.uint64(word))
    value = _U0
    for k in range(start, len(bits)):
        value |= np.uint64(bits[k]) << np.uint64((k - start) * 8 * bits.itemsize)
    return value


@_inline  # type: ignore[untyped-decorator]
def _mask_at(base: Any, new: Any, line: Any, word_shift: Any) -> Any:
    start = line << (word_shift + 3)
    if start + (8 << word_shift) <= len(base):
        return _line_mask(base, new, line)
    mask = _U0
    for k in range(start, len(base)):
        mask |= np.uint64(base[k] != new[k]) << np.uint64(k - start)
    return mask


@_inline  # type: ignore[untyped-decorator]
def _lines(bits: Any, word_shift: Any) -> Any:
    return (len(bits) + (8 << word_shift) - 1) >> (word_shift + 3)


# As in `forebay.wire.ulp`, without branches: whether a sign is set is not to be guessed.


@_inline  # type: ignore[untyped-decorator]
def _ordered(bits: Any, is_float: Any, sign: Any, full: Any) -> Any:
    return bits ^ (((_U0 - (bits >> sign)) & full) | (_U1 << sign)) if is_float else bits


@_inline  # type: ignore[untyped-decorator]
def _unordered(ordered: Any, is_float: Any, sign: Any, full: Any) -> Any:
    return ordered ^ ((((ordered >> sign) - _U1) & full) | (_U1 << sign)) if is_float else ordered


@_inline  # type: ignore[untyped-decorator]
def _step(old: Any, new: Any, is_float: Any, sign: Any, full: Any) -> Any:
    distance = (_ordered(new, is_float, sign, full) - _ordered(old, is_float, sign, full)) & full
    return ((distance << _U1) & full) ^ ((_U0 - (distance >> sign)) & full)


@_inline  # type: ignore[untyped-decorator]
def _stepped(old: Any, zigzag: Any, is_float: Any, sign: Any, full: Any) -> Any:
    distance = (zigzag >> _U1) ^ ((_U0 - (zigzag & _U1)) & full)
    return _unordered((_ordered(old, is_float, sign, full) + distance) & full, is_float, sign, full)


@_compile  # type: ignore[untyped-decorator]
def _difference(
    base: Any, new: Any, is_float: Any, first_word: Any, word_shift: Any, gaps: Any, escapes: Any, steps: Any
) -> Any:
    width = np.uint64(8 * base.itemsize)
    sign, full = width - _U1, (_U0 - _U1) >> (np.uint64(64) - width)
    last, hashed, changed, escaped = -1, -1, 0, 0
    first, second = _U0, _U0
    for line in range(_lines(base, word_shift)):
        mask = _mask_at(base, new, line, word_shift)
        while mask:
            at = (line << (word_shift + 3)) + np.int64(_lowest(mask))
            mask &= mask - _U1
            gap, last = at - last - 1, at
            gaps[changed] = min(gap, _ESCAPE)
            if gap >= _ESCAPE:
                escapes[escaped] = gap - _ESCAPE
                escaped += 1
            steps[changed] = _step(np.uint64(base[at]), np.uint64(new[at]), is_float, sign, full)
            changed += 1
            if at >> word_shift != hashed:
                hashed = at >> word_shift
                key = _key(first_word + np.uint64(hashed))
                before = _mixed(key, _word_at(base, hashed, word_shift))
                after = _mixed(key, _word_at(new, hashed, word_shift))
                first += _first_of(after) - _first_of(before)
                second += _second_of(after) - _second_of(before)
    return changed, escaped, first, second


@_compile  # type: ignore[untyped-decorator]
def _positions(gaps: Any, escapes: Any, positions: Any) -> Any:
    at, escaped = -1, 0
    for k in range(len(gaps)):
        at += np.int64(gaps[k]) + 1
        if gaps[k] == _ESCAPE:
            at += np.int64(escapes[escaped])
            escaped += 1
        positions[k] = at
    return at


@_compile  # type: ignore[untyped-decorator]
def _advance(target: Any, positions: Any, steps: Any, is_float: Any, first_word: Any, word_shift: Any) -> Any:
    width = np.uint64(8 * target.itemsize)
    sign, full = width - _U1, (_U0 - _U1) >> (np.uint64(64) - width)
    hashed = -1
    key, after, first, second = _U0, _U0, _U0, _U0
    before = _mixed(key, after)
    for k in range(len(positions)):
        at = np.int64(positions[k])
        _prefetch(target, np.int64(positions[min(k + _AHEAD, len(positions) - 1)]))
        if at >> word_shift != hashed:
            mixed = _mixed(key, after)
            first += _first_of(mixed) - _first_of(before)
            second += _second_of(mixed) - _second_of(before)
            hashed = at >> word_shift
            key = _key(first_word + np.uint64(hashed))
            after = _word_at(target, hashed, word_shift)
            before = _mixed(key, after)
        shift = np.uint64(at - (hashed << word_shift)) * width
        fresh = _stepped((after >> shift) & full, np.uint64(steps[k]), is_float, sign, full)
        after = (after & ~(full << shift)) | (fresh << shift)
        target[at] = fresh
    mixed = _mixed(key, after)
    return first + _first_of(mixed) - _first_of(before), second + _second_of(mixed) - _second_of(before)


@_compile  # type: ignore[untyped-decorator]
def _fingerprint(content: Any, first_word: Any, tail: Any, has_tail: Any) -> Any:
    first, second = _U0, _U0
    words = len(content) // 8
    for k in range(words):
        mixed = _mixed(_key(first_word + np.uint64(k)), _load_word(content, np.uint64(k)))
        first += _first_of(mixed)
        second += _second_of(mixed)
    if has_tail:
        mixed = _mixed(_key(first_word + np.uint64(words)), tail)
        first += _first_of(mixed)
        second += _second_of(mixed)
    return first, second


@_inline  # type: ignore[untyped-decorator]
def _below_at(bits: Any, line: Any, limit: Any, word_shift: Any) -> Any:
    start = line << (word_shift + 3)
    if start + (8 << word_shift) <= len(bits):
        return _line_below(bits, line, limit)
    mask, unsigned = _U0, (_U0 - _U1) >> np.uint64(65 - 8 * bits.itemsize)
    for k in range(start, len(bits)):
        mask |= np.uint64((np.uint64(bits[k]) & unsigned) < limit) << np.uint64(k - start)
    return mask


@_compile  # type: ignore[untyped-decorator]
def _survey(base: Any, positions: Any, shift: Any, word_shift: Any, stride: Any, changed: Any, present: Any) -> Any:
    unsigned = (_U0 - _U1) >> np.uint64(65 - 8 * base.itemsize)
    for k in range(len(positions)):
        changed[(np.uint64(base[positions[k]]) & unsigned) >> shift] += 1
    for line in range(0, _lines(base, word_shift), stride):
        for at in range(line << (word_shift + 3), min(len(base), (line + 1) << (word_shift + 3))):
            present[(np.uint64(base[at]) & unsigned) >> shift] += stride


@_compile  # type: ignore[untyped-decorator]
def _classified(
    base: Any, positions: Any, found: Any, limits: Any, word_shift: Any, places: Any, gaps: Any, steps: Any
) -> Any:
    kinds = len(limits)
    masks, seen, after = np.zeros(kinds + 1, np.uint64), np.zeros(kinds + 1, np.int64), np.zeros(kinds + 1, np.int64)
    k = 0
    for line in range(_lines(base, word_shift)):
        start, end = line << (word_shift + 3), (line + 1) << (word_shift + 3)
        small = _below_at(base, line, limits[kinds - 1], word_shift) if kinds else _U0
        if small:
            below = _U0
            for kind in range(kinds):
                within = _below_at(base, line, limits[kind], word_shift)
                masks[kind], below = within & ~below, within
        while k < len(positions) and positions[k] < end:
            at = np.int64(positions[k])
            bit, kind, rank = _U1 << np.uint64(at - start), kinds, at
            if small & bit:
                kind = 0
                while not masks[kind] & bit:
                    kind += 1
                rank = seen[kind] + _ones(masks[kind] & (bit - _U1))
            place = places[kind]
            gaps[place], steps[place] = rank - after[kind], found[k]
            after[kind], places[kind] = rank + 1, place + 1
            k += 1
        if small:
            for kind in range(kinds):
                seen[kind] += _ones(masks[kind])


@_compile  # type: ignore[untyped-decorator]
def _class_advance(target: Any, limits: Any, left: Any, gaps: Any, steps: Any, first_word: Any, word_shift: Any) -> Any:
    width = np.uint64(8 * target.itemsize)
    sign, full = width - _U1, (_U0 - _U1) >> (np.uint64(64) - width)
    kinds, remaining = len(limits), 0
    first, second = _U0, _U0
    until, places = np.full(kinds + 1, _NEVER, np.int64), np.zeros(kinds + 1, np.int64)
    masks, fresh = np.zeros(kinds + 1, np.uint64), np.zeros(_LINE_BYTES, np.uint64)
    for kind in range(kinds + 1):
        places[kind] = remaining
        if left[kind]:
            until[kind] = np.int64(gaps[remaining])
            remaining += left[kind]
    for line in range(_lines(target, word_shift)):
        start, lanes = line << (word_shift + 3), min(8 << word_shift, len(target) - (line << (word_shift + 3)))
        small = _below_at(target, line, limits[kinds - 1], word_shift) if kinds else _U0
        if not small and until[kinds] >= lanes:
            until[kinds] -= lanes
            continue
        below = _U0
        for kind in range(kinds):
            within = _below_at(target, line, limits[kind], word_shift)
            masks[kind], below = within & ~below, within
        masks[kinds] = (_U0 - _U1) >> np.uint64(64 - lanes)
        hit = _U0
        for kind in range(kinds + 1):
            mask = masks[kind]
            size = _ones(mask)
            passed = 0
            while until[kind] < size - passed:
                for _ in range(until[kind]):
                    mask &= mask - _U1
                bit = np.int64(_lowest(mask))
                mask &= mask - _U1
                passed += until[kind] + 1
                place = places[kind]
                fresh[bit] = _stepped(np.uint64(target[start + bit]), np.uint64(steps[place]), True, sign, full)
                hit |= _U1 << np.uint64(bit)
                places[kind], left[kind], remaining = place + 1, left[kind] - 1, remaining - 1
                until[kind] = np.int64(gaps[place + 1]) if left[kind] else _NEVER
            until[kind] -= size - passed
        while hit:
            word = np.int64(_lowest(hit)) >> word_shift
            hashed = (start >> word_shift) + word
            key = _key(first_word + np.uint64(hashed))
            before = _mixed(key, _word_at(target, hashed, word_shift))
            while hit and np.int64(_lowest(hit)) >> word_shift == word:
                bit = np.int64(_lowest(hit))
                hit &= hit - _U1
                target[start + bit] = fresh[bit]
            after = _mixed(key, _word_at(target, hashed, word_shift))
            first += _first_of(after) - _first_of(before)
            second += _second_of(after) - _second_of(before)
    return remaining, first, second
