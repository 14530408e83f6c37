"""The inner loops over weights in numpy alone: what `forebay.wire.compiled` must equal, and what runs without numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forebay.wire import classes, ulp
from forebay.wire import gaps as gap_codes
from forebay.wire.dtype import Bits
from forebay.wire.fingerprint import MIXERS, NOTHING, Sums, minus
from forebay.wire.loops import ClassDifference, Difference, outside

_WORD_BYTES = 8
_LINE_BYTES = 64
_A, _B, _C, _D, _E = (np.uint64(mixer) for mixer in MIXERS)


def difference(base: Bits, new: Bits, *, is_float: bool, first_word: int) -> Difference:
    """How `new` [n] differs from `base` [n]. `first_word` is the index in its tensor of the first 8-byte word.

    Compares integers: as floats, -0.0 would equal 0.0 and NaN would differ from itself.
    """
    positions = np.flatnonzero(base != new)
    gaps, escapes = gap_codes.encode(positions)
    words = _words_of(positions, new)
    return Difference(
        gaps=gaps,
        escapes=escapes,
        steps=ulp.steps(base[positions], new[positions], is_float=is_float),
        change=minus(_sums(new, words, first_word), _sums(base, words, first_word)),
    )


def advance(
    target: Bits,
    gaps: NDArray[np.uint8],
    escapes: NDArray[np.uint32],
    steps: Bits,
    *,
    is_float: bool,
    first_word: int,
) -> Sums:
    """Turn `target` [n] from base to new in place; how its fingerprint changed. `escapes` are as many as escaped gaps.

    Raises WireError for a position outside; the target may be changed by then.
    """
    positions = gap_codes.decode(gaps, escapes, len(target))
    words = _words_of(positions, target)
    before = _sums(target, words, first_word)
    target[positions] = ulp.advance(target[positions], steps, is_float=is_float)
    return minus(_sums(target, words, first_word), before)


def fingerprint(content: NDArray[np.uint8], first_word: int) -> Sums:
    """The sums over all words of `content` [bytes]; the last one is filled up with zeros."""
    return _sums(content, np.arange(-(-len(content) // _WORD_BYTES)), first_word)


def short_steps(steps: Bits) -> tuple[NDArray[np.uint8], Bits]:
    """A byte each, and those of 255 or more whole: of steps of one or two bytes."""
    return np.minimum(steps, gap_codes.ESCAPE).astype(np.uint8), steps[steps >= gap_codes.ESCAPE]


def long_steps(short: NDArray[np.uint8], escaped: Bits) -> Bits:
    """The inverse; `escaped` has an entry for every 255."""
    steps = short.astype(escaped.dtype)
    steps[short == gap_codes.ESCAPE] = escaped
    return steps


def classified(base: Bits, found: Difference, shift: int) -> ClassDifference:
    """What `difference` found, counted in classes of the old values: magnitude >> shift is an element's exponent."""
    positions = gap_codes.decode(found.gaps, found.escapes, len(base))
    exponents = _exponents(base, shift)
    lanes = _LINE_BYTES // base.itemsize
    seen = np.pad(exponents, (0, -len(exponents) % lanes), constant_values=-1).reshape(-1, lanes)
    step = classes.stride(len(base))
    sampled = seen[::step].ravel()
    present = np.bincount(sampled[sampled >= 0], minlength=classes.EXPONENTS) * step
    changed = np.bincount(exponents[positions], minlength=classes.EXPONENTS)
    bounds = classes.cut(changed, present, classes.LOGS)
    own = np.searchsorted(bounds, exponents, side="right")
    order = np.argsort(own[positions], kind="stable")
    counts = np.bincount(own[positions], minlength=len(bounds) + 1)
    gaps = [_gaps_in_class(own, positions, one, rest=one == len(bounds)) for one in range(len(bounds) + 1)]
    return ClassDifference(
        bounds=bounds, counts=counts, gaps=np.concatenate(gaps).astype(np.uint32), steps=found.steps[order]
    )


def class_advance(target: Bits, found: ClassDifference, shift: int, *, first_word: int) -> Sums:
    """Turn `target` [n] from base to new in place; how its fingerprint changed. Raises WireError for a position
    outside; the target may be changed by then."""
    own = np.searchsorted(found.bounds, _exponents(target, shift), side="right")
    parts = np.split(found.gaps, np.cumsum(found.counts)[:-1])
    places = [_places_in_class(own, part, one, rest=one == len(parts) - 1) for one, part in enumerate(parts)]
    positions = np.concatenate(places)
    words = _words_of(np.sort(positions), target)
    before = _sums(target, words, first_word)
    target[positions] = ulp.advance(target[positions], found.steps, is_float=True)
    return minus(_sums(target, words, first_word), before)


def _exponents(bits: Bits, shift: int) -> NDArray[np.int64]:
    magnitudes = bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    return (magnitudes >> bits.dtype.type(shift)).astype(np.int64)


def _gaps_in_class(own: NDArray[np.int64], positions: NDArray[np.int64], one: int, *, rest: bool) -> NDArray[np.int64]:
    mine = positions[own[positions] == one]
    ranks = mine if rest else np.searchsorted(np.flatnonzero(own == one), mine)
    return np.diff(ranks, prepend=-1) - 1


def _places_in_class(own: NDArray[np.int64], gaps: NDArray[np.uint32], one: int, *, rest: bool) -> NDArray[np.int64]:
    ranks = np.cumsum(gaps.astype(np.int64) + 1) - 1
    members = np.arange(len(own)) if rest else np.flatnonzero(own == one)
    if len(ranks) and ranks[-1] >= len(members):
        raise outside(int(ranks[-1]), len(members))
    return members[ranks]


def _words_of(positions: NDArray[np.int64], bits: Bits) -> NDArray[np.int64]:
    """Indices of the words that hold these elements, each once; positions grow."""
    words = positions // (_WORD_BYTES // bits.itemsize)
    once: NDArray[np.int64] = words[np.diff(words, prepend=-1) != 0]
    return once


def _sums(bits: Bits, words: NDArray[np.int64], first_word: int) -> Sums:
    if not len(words):
        return NOTHING
    content = np.ascontiguousarray(bits).view(np.uint8)
    if len(content) % _WORD_BYTES:
        content = np.concatenate([content, np.zeros(-len(content) % _WORD_BYTES, np.uint8)])
    values = content.view("<u8")[words]
    keys = (words.astype(np.uint64) + np.uint64(first_word)) * _A + _B
    mixed = (values ^ keys) * _C
    mixed ^= mixed >> np.uint64(32)
    return int((mixed * _D).sum()), int(((mixed ^ (mixed >> np.uint64(29))) * _E).sum())
