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
from numba import njit
from numpy.typing import NDArray

from forebay.wire import classes
from forebay.wire.dtype import Bits
from forebay.wire.fingerprint import MIXERS, Sums
from forebay.wire.intrinsics import (
    line_below,
    line_mask,
    load_word,
    lowest,
    ones,
    prefetch,
    store_word,
    width_of,
    word_shift_of,
)
from forebay.wire.loops import ClassDifference, Difference, outside

_LINE_BYTES = 64
_ESCAPE = 255
_AHEAD = 32  #: changes
_A, _B, _C = (np.uint64(mixer) for mixer in MIXERS[:3])
_FULL = (1 << 64) - 1
_U0, _U1, _U29, _U32 = np.uint64(0), np.uint64(1), np.uint64(29), np.uint64(32)
_NEVER = np.int64(1) << np.int64(62)


def difference(base: Bits, new: Bits, *, is_float: bool, first_word: int) -> Difference:
    """See `forebay.wire.plain.difference`."""
    gaps, steps = np.empty(len(new), np.uint8), np.empty(len(new), new.dtype)
    escapes = np.empty(len(new) // _ESCAPE + 1, np.uint32)
    changed, escaped, *sums = _difference(base, new, is_float, np.uint64(first_word), gaps, escapes, steps)
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
    return _sums(*_advance(target, positions, steps, is_float, np.uint64(first_word)))


def fingerprint(content: NDArray[np.uint8], first_word: int) -> Sums:
    """See `forebay.wire.plain.fingerprint`."""
    whole = len(content) & ~7
    tail = int.from_bytes(content[whole:].tobytes(), "little")
    return _sums(*_fingerprint(content[:whole], np.uint64(first_word), np.uint64(tail), whole < len(content)))


def short_steps(steps: Bits) -> tuple[NDArray[np.uint8], Bits]:
    """See `forebay.wire.plain.short_steps`."""
    short, escaped = np.empty(len(steps), np.uint8), np.empty(len(steps) + 1, steps.dtype)
    return short, escaped[: _short_steps(steps, short, escaped)]


def long_steps(short: NDArray[np.uint8], escaped: Bits) -> Bits:
    """See `forebay.wire.plain.long_steps`."""
    steps = np.empty(len(short), escaped.dtype)
    _long_steps(short, escaped, steps)
    return steps


def classified(base: Bits, found: Difference, shift: int) -> ClassDifference:
    """See `forebay.wire.plain.classified`."""
    positions = np.empty(len(found.gaps), np.uint32)
    _positions(found.gaps, found.escapes, positions)
    changed, present = np.zeros(classes.EXPONENTS, np.int64), np.zeros(classes.EXPONENTS, np.int64)
    _survey(base, positions, np.uint64(shift), classes.stride(len(base)), changed, present)
    bounds = _cut(changed, present, classes.LOGS)
    counts = np.add.reduceat(changed, np.concatenate([[0], bounds])) if len(bounds) else changed.sum(keepdims=True)
    gaps, steps = np.empty(len(positions), np.uint32), np.empty(len(positions), base.dtype)
    limits = bounds.astype(np.uint64) << np.uint64(shift)
    _classified(base, positions, found.steps, limits, np.cumsum(counts) - counts, gaps, steps)
    return ClassDifference(bounds=bounds, counts=counts, gaps=gaps, steps=steps)


def class_advance(target: Bits, found: ClassDifference, shift: int, *, first_word: int) -> Sums:
    """See `forebay.wire.plain.class_advance`."""
    limits = found.bounds.astype(np.uint64) << np.uint64(shift)
    left, *sums = _class_advance(target, limits, found.counts.copy(), found.gaps, found.steps, np.uint64(first_word))
    if left:
        raise outside(len(target), len(target))
    return _sums(*sums)


def _sums(first: Any, second: Any) -> Sums:
    return (int(first) * MIXERS[3]) & _FULL, (int(second) * MIXERS[4]) & _FULL


_inline = njit(nogil=True, cache=True, inline="always", error_model="numpy")
_compile = njit(nogil=True, cache=True, error_model="numpy")


_cut: Any = _compile(classes.cut)


@_inline  # type: ignore[untyped-decorator]
def _mixed(key: Any, value: Any) -> Any:
    x = (value ^ key) * _C
    return x ^ (x >> _U32)


@_inline  # type: ignore[untyped-decorator]
def _twice(mixed: Any) -> Any:
    return mixed ^ (mixed >> _U29)


# Both sums are kept without their factors D and E until `_sums`: a product less for every word.


@_inline  # type: ignore[untyped-decorator]
def _key(word: Any) -> Any:
    return word * _A + _B


@_inline  # type: ignore[untyped-decorator]
def _word_at(bits: Any, word: Any) -> Any:
    """The word, or what there is of the last one."""
    word_shift = word_shift_of(bits)
    start = word << word_shift
    if start + (1 << word_shift) <= len(bits):
        return load_word(bits, np.uint64(word))
    value = _U0
    for k in range(start, len(bits)):
        value |= np.uint64(bits[k]) << np.uint64(k - start) * width_of(bits)
    return value


@_inline  # type: ignore[untyped-decorator]
def _mask_at(base: Any, new: Any, line: Any) -> Any:
    lanes = 8 << word_shift_of(base)
    start = line * lanes
    if start + lanes <= len(base):
        return line_mask(base, new, line)
    mask = _U0
    for k in range(start, len(base)):
        mask |= np.uint64(base[k] != new[k]) << np.uint64(k - start)
    return mask


@_inline  # type: ignore[untyped-decorator]
def _lines(bits: Any) -> Any:
    return (len(bits) + (8 << word_shift_of(bits)) - 1) >> (word_shift_of(bits) + 3)


# As in `forebay.wire.ulp`, without branches: whether a sign is set is not to be guessed. `flips` is 0 of integers.


@_inline  # type: ignore[untyped-decorator]
def _full_of(bits: Any) -> Any:
    return (_U0 - _U1) >> (np.uint64(64) - width_of(bits))


@_inline  # type: ignore[untyped-decorator]
def _ordered(value: Any, flips: Any, sign: Any) -> Any:
    return value ^ (((_U0 - (value >> sign)) | (_U1 << sign)) & flips)


@_inline  # type: ignore[untyped-decorator]
def _unordered(ordered: Any, flips: Any, sign: Any) -> Any:
    return ordered ^ ((((ordered >> sign) - _U1) | (_U1 << sign)) & flips)


@_inline  # type: ignore[untyped-decorator]
def _step(bits: Any, old: Any, new: Any, flips: Any) -> Any:
    sign, full = width_of(bits) - _U1, _full_of(bits)
    distance = (_ordered(new, flips, sign) - _ordered(old, flips, sign)) & full
    return ((distance << _U1) & full) ^ ((_U0 - (distance >> sign)) & full)


@_inline  # type: ignore[untyped-decorator]
def _stepped(bits: Any, old: Any, zigzag: Any, flips: Any) -> Any:
    sign, full = width_of(bits) - _U1, _full_of(bits)
    distance = (zigzag >> _U1) ^ ((_U0 - (zigzag & _U1)) & full)
    return _unordered((_ordered(old, flips, sign) + distance) & full, flips, sign)


@_compile  # type: ignore[untyped-decorator]
def _difference(base: Any, new: Any, is_float: Any, first_word: Any, gaps: Any, escapes: Any, steps: Any) -> Any:
    word_shift, flips = word_shift_of(base), _full_of(base) if is_float else _U0
    last, hashed, changed, escaped = -1, -1, 0, 0
    first, second = _U0, _U0
    for line in range(_lines(base)):
        mask = _mask_at(base, new, line)
        while mask:
            at = (line << (word_shift + 3)) + np.int64(lowest(mask))
            mask &= mask - _U1
            gap, last = at - last - 1, at
            gaps[changed] = min(gap, _ESCAPE)
            if gap >= _ESCAPE:
                escapes[escaped] = gap - _ESCAPE
                escaped += 1
            steps[changed] = _step(base, np.uint64(base[at]), np.uint64(new[at]), flips)
            changed += 1
            if at >> word_shift != hashed:
                hashed = at >> word_shift
                key = _key(first_word + np.uint64(hashed))
                before = _mixed(key, _word_at(base, hashed))
                after = _mixed(key, _word_at(new, hashed))
                first += after - before
                second += _twice(after) - _twice(before)
    return changed, escaped, first, second


@_compile  # type: ignore[untyped-decorator]
def _short_steps(steps: Any, short: Any, escaped: Any) -> Any:
    count = 0
    for k in range(len(steps)):
        short[k] = min(steps[k], _ESCAPE)
        escaped[count] = steps[k]
        count += steps[k] >= _ESCAPE
    return count


@_compile  # type: ignore[untyped-decorator]
def _long_steps(short: Any, escaped: Any, steps: Any) -> Any:
    count = 0
    for k in range(len(short)):
        steps[k] = short[k]
        if short[k] == _ESCAPE:
            steps[k] = escaped[count]
            count += 1


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


@_inline  # type: ignore[untyped-decorator]
def _move(target: Any, at: Any, zigzag: Any, flips: Any, first_word: Any) -> Any:
    """Change an element; what that adds to both sums. Each change counts by itself, also the second one of a word:
    so there is nothing to guess, and none waits for another."""
    word_shift, full = word_shift_of(target), _full_of(target)
    word = at >> word_shift
    key, old = _key(first_word + np.uint64(word)), _word_at(target, word)
    shift = np.uint64(at - (word << word_shift)) * width_of(target)
    fresh = _stepped(target, (old >> shift) & full, zigzag, flips)
    new = (old & ~(full << shift)) | (fresh << shift)
    if (word + 1) << word_shift <= len(target):
        store_word(target, np.uint64(word), new)
    else:
        target[at] = fresh
    before, after = _mixed(key, old), _mixed(key, new)
    return after - before, _twice(after) - _twice(before)


@_compile  # type: ignore[untyped-decorator]
def _advance(target: Any, positions: Any, steps: Any, is_float: Any, first_word: Any) -> Any:
    flips, first, second = _full_of(target) if is_float else _U0, _U0, _U0
    for k in range(len(positions)):
        prefetch(target, np.int64(positions[min(k + _AHEAD, len(positions) - 1)]))
        more = _move(target, np.int64(positions[k]), np.uint64(steps[k]), flips, first_word)
        first += more[0]
        second += more[1]
    return first, second


@_compile  # type: ignore[untyped-decorator]
def _fingerprint(content: Any, first_word: Any, tail: Any, has_tail: Any) -> Any:
    first, second = _U0, _U0
    words = len(content) // 8
    for k in range(words):
        mixed = _mixed(_key(first_word + np.uint64(k)), load_word(content, np.uint64(k)))
        first += mixed
        second += _twice(mixed)
    if has_tail:
        mixed = _mixed(_key(first_word + np.uint64(words)), tail)
        first += mixed
        second += _twice(mixed)
    return first, second


@_inline  # type: ignore[untyped-decorator]
def _below_at(bits: Any, line: Any, limit: Any) -> Any:
    lanes = 8 << word_shift_of(bits)
    start = line * lanes
    if start + lanes <= len(bits):
        return line_below(bits, line, limit)
    mask, unsigned = _U0, (_U0 - _U1) >> (np.uint64(65) - width_of(bits))
    for k in range(start, len(bits)):
        mask |= np.uint64((np.uint64(bits[k]) & unsigned) < limit) << np.uint64(k - start)
    return mask


@_compile  # type: ignore[untyped-decorator]
def _survey(base: Any, positions: Any, shift: Any, stride: Any, changed: Any, present: Any) -> Any:
    unsigned = (_U0 - _U1) >> (np.uint64(65) - width_of(base))
    for k in range(len(positions)):
        changed[(np.uint64(base[positions[k]]) & unsigned) >> shift] += 1
    lanes = 8 << word_shift_of(base)
    for line in range(0, _lines(base), stride):
        for at in range(line * lanes, min(len(base), (line + 1) * lanes)):
            present[(np.uint64(base[at]) & unsigned) >> shift] += stride


@_inline  # type: ignore[untyped-decorator]
def _masks_of(bits: Any, line: Any, limits: Any, masks: Any) -> Any:
    """Which elements of a line belong to each class but the rest."""
    below = _U0
    for kind in range(len(limits)):
        within = _below_at(bits, line, limits[kind])
        masks[kind], below = within & ~below, within


@_compile  # type: ignore[untyped-decorator]
def _classified(base: Any, positions: Any, found: Any, limits: Any, places: Any, gaps: Any, steps: Any) -> Any:
    kinds, lanes, k = len(limits), 8 << word_shift_of(base), 0
    masks, seen, after = np.zeros(kinds + 1, np.uint64), np.zeros(kinds + 1, np.int64), np.zeros(kinds + 1, np.int64)
    for line in range(_lines(base)):
        small = _below_at(base, line, limits[kinds - 1]) if kinds else _U0
        if small:
            _masks_of(base, line, limits, masks)
        while k < len(positions) and positions[k] < (line + 1) * lanes:
            at = np.int64(positions[k])
            bit, kind, rank = _U1 << np.uint64(at - line * lanes), kinds, at
            if small & bit:
                kind = 0
                while not masks[kind] & bit:
                    kind += 1
                rank = seen[kind] + ones(masks[kind] & (bit - _U1))
            place = places[kind]
            gaps[place], steps[place] = rank - after[kind], found[k]
            after[kind], places[kind] = rank + 1, place + 1
            k += 1
        if small:
            for kind in range(kinds):
                seen[kind] += ones(masks[kind])


@_inline  # type: ignore[untyped-decorator]
def _hits_of(mask: Any, kind: Any, until: Any, places: Any, left: Any, gaps: Any, hits: Any, count: Any) -> Any:
    """Note which of a class's elements in a line change, as (bit, place of its step); how many are noted now."""
    size, passed = ones(mask), 0
    while until[kind] < size - passed:
        for _ in range(until[kind]):
            mask &= mask - _U1
        hits[count, 0], hits[count, 1] = lowest(mask), places[kind]
        mask &= mask - _U1
        count, passed = count + 1, passed + until[kind] + 1
        places[kind], left[kind] = places[kind] + 1, left[kind] - 1
        until[kind] = np.int64(gaps[places[kind]]) if left[kind] else _NEVER
    until[kind] -= size - passed
    return count


@_compile  # type: ignore[untyped-decorator]
def _class_advance(target: Any, limits: Any, left: Any, gaps: Any, steps: Any, first_word: Any) -> Any:
    kinds, first, second = len(limits), _U0, _U0
    until, places = np.full(kinds + 1, _NEVER, np.int64), np.cumsum(left) - left
    # Who lies may have an element change twice: by its class and by the rest.
    masks, hits = np.zeros(kinds + 1, np.uint64), np.zeros((2 * _LINE_BYTES, 2), np.int64)
    for kind in range(kinds + 1):
        if left[kind]:
            until[kind] = np.int64(gaps[places[kind]])
    for line in range(_lines(target)):
        start = line * (8 << word_shift_of(target))
        lanes = min(8 << word_shift_of(target), len(target) - start)
        small = _below_at(target, line, limits[kinds - 1]) if kinds else _U0
        if not small and until[kinds] >= lanes:
            until[kinds] -= lanes
            continue
        _masks_of(target, line, limits, masks)
        masks[kinds] = (_U0 - _U1) >> np.uint64(64 - lanes)
        count = 0
        for kind in range(kinds + 1):
            count = _hits_of(masks[kind], kind, until, places, left, gaps, hits, count)
        for k in range(count):
            more = _move(target, start + hits[k, 0], np.uint64(steps[hits[k, 1]]), _full_of(target), first_word)
            first += more[0]
            second += more[1]
    return left.sum(), first, second
