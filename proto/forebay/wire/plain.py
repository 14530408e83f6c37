"""The inner loops over weights in numpy alone: what `forebay.wire.compiled` must equal, and what runs without numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forebay.wire import gaps as gap_codes
from forebay.wire import ulp
from forebay.wire.dtype import Bits
from forebay.wire.fingerprint import MIXERS, NOTHING, Sums, minus
from forebay.wire.loops import ClassDifference, Difference, outside

_WORD_BYTES = 8
_CLASSES = 256
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


def class_difference(base: Bits, new: Bits, shift: int, *, first_word: int) -> ClassDifference:
    """Like `difference` for floats, counted in classes: an element's class is (old bits >> shift) mod 256.

    Positions are counted among the elements of one class; classes follow one another, lowest first.
    """
    classes = _classes(base, shift)
    order = np.argsort(classes, kind="stable")
    changed = np.flatnonzero((base != new)[order])
    positions = order[changed]
    counts = np.bincount(classes[positions], minlength=_CLASSES)
    starts = np.cumsum(np.bincount(classes, minlength=_CLASSES)) - np.bincount(classes, minlength=_CLASSES)
    words = _words_of(np.sort(positions), new)
    return ClassDifference(
        counts=counts,
        gaps=_gaps_within(changed, starts[classes[positions]]),
        steps=ulp.steps(base[positions], new[positions], is_float=True),
        change=minus(_sums(new, words, first_word), _sums(base, words, first_word)),
    )


def class_advance(
    target: Bits, counts: NDArray[np.int64], gaps: NDArray[np.uint32], steps: Bits, shift: int, *, first_word: int
) -> Sums:
    """The inverse of `class_difference`, in place. Raises WireError for a position outside its class."""
    classes = _classes(target, shift)
    order = np.argsort(classes, kind="stable")
    ends = np.cumsum(np.bincount(classes, minlength=_CLASSES))
    starts = ends - np.bincount(classes, minlength=_CLASSES)
    strides = np.cumsum(gaps.astype(np.int64) + 1) - 1
    firsts = np.cumsum(counts) - counts
    own = np.repeat(np.arange(_CLASSES), counts)
    offsets = np.where(firsts > 0, strides[np.maximum(firsts - 1, 0)] + 1, 0) if len(strides) else firsts
    places = strides - offsets[own] + starts[own]
    if bool((places >= ends[own]).any()):
        raise outside(len(target), len(target))
    positions = order[places]
    words = _words_of(np.sort(positions), target)
    before = _sums(target, words, first_word)
    target[positions] = ulp.advance(target[positions], steps, is_float=True)
    return minus(_sums(target, words, first_word), before)


def _classes(bits: Bits, shift: int) -> NDArray[np.uint8]:
    classes: NDArray[np.uint8] = (bits >> bits.dtype.type(shift)).astype(np.uint8)
    return classes


def _gaps_within(changed: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.uint32]:
    before = np.empty_like(changed)
    before[:1] = -1
    before[1:] = changed[:-1]
    gaps: NDArray[np.uint32] = (changed - np.maximum(before, starts - 1) - 1).astype(np.uint32)
    return gaps


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
