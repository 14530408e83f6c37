"""The compiled loops give what the plain ones give: the same bytes on the wire with and without numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.wire import compiled, plain
from forebay.wire.errors import WireError
from forebay.wire.loops import ClassDifference

_DTYPES = [np.uint8, np.uint16, np.uint32, np.uint64]
_SHIFTS = {1: 3, 2: 7, 4: 23, 8: 55}
_MAKES = [plain, compiled]


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    """Elements before and after, of any width; lengths around words and lines matter."""
    dtype = draw(st.sampled_from(_DTYPES))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.one_of(st.integers(0, 140), st.sampled_from([1000, 4099])))
    old = random.integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True)
    other = old + random.integers(0, 3, count).astype(dtype) if draw(st.booleans()) else random.permutation(old)
    moved = random.random(count) < draw(st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]))
    return old, np.where(moved, other, old).astype(dtype)


def _same(left: Any, right: Any) -> bool:
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in left.__slots__)


@settings(max_examples=200, deadline=None)
@given(_pairs(), st.booleans(), st.integers(0, 2**40))
def test_differences_are_the_same_and_lead_to_the_new_elements(pair: Any, is_float: bool, word: int) -> None:
    old, new = pair
    found = [make.difference(old, new, is_float=is_float, first_word=word) for make in _MAKES]
    assert _same(*found)
    for make in _MAKES:
        target, one = old.copy(), found[0]
        change = make.advance(target, one.gaps, one.escapes, one.steps, is_float=is_float, first_word=word)
        assert np.array_equal(target, new)
        assert change == one.change


@settings(max_examples=200, deadline=None)
@given(_pairs(), st.integers(0, 2**40))
def test_classes_are_the_same_and_lead_to_the_new_elements(pair: Any, word: int) -> None:
    old, new = pair
    shift, plainly = _SHIFTS[old.itemsize], plain.difference(old, new, is_float=True, first_word=word)
    found = [make.classified(old, plainly, shift) for make in _MAKES]
    assert _same(*found)
    for make in _MAKES:
        target = old.copy()
        change = make.class_advance(target, found[0], shift, first_word=word)
        assert np.array_equal(target, new)
        assert change == plainly.change


def test_small_values_that_change_often_get_classes_of_their_own() -> None:
    random = np.random.default_rng(3)
    old = (random.standard_normal(200_000, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    chance = np.where((old & 0x7FFF) >> 7 < 124, 0.9, 0.001)
    new = old + (random.random(len(old)) < chance).astype(np.uint16)
    found = [make.classified(old, plain.difference(old, new, is_float=True, first_word=0), 7) for make in _MAKES]
    assert _same(*found)
    assert 124 in found[0].bounds


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**40))
def test_fingerprints_are_the_same(content: bytes, word: int) -> None:
    data = np.frombuffer(content, np.uint8)
    assert plain.fingerprint(data, word) == compiled.fingerprint(data, word)


@pytest.mark.parametrize("make", _MAKES)
def test_positions_outside_are_refused_before_anything_is_changed(make: Any) -> None:
    target, one = np.zeros(10, np.uint16), np.ones(2, np.uint16)
    with pytest.raises(WireError, match="changed position"):
        make.advance(target, np.array([3, 6], np.uint8), np.zeros(0, np.uint32), one, is_float=True, first_word=0)
    assert not target.any()
    for bounds, counts in (([], [2]), ([9], [2, 0]), ([9], [1, 1])):
        found = ClassDifference(
            bounds=np.array(bounds, np.int64),
            counts=np.array(counts, np.int64),
            gaps=np.array([3, 6] if len(counts) == 1 or 0 in counts else [3, 10], np.uint32),
            steps=one,
        )
        with pytest.raises(WireError, match="changed position"):
            make.class_advance(target.copy(), found, 7, first_word=0)
