"""Sorted positions as gaps: one byte each, 255 an escape whose rest stands in a stream of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forebay.wire.errors import WireError

ESCAPE = 255


def encode(positions: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Gaps (elements skipped) of strictly growing `positions` [n]: bytes [n], and gap - 255 of each escaped one."""
    return shorten(np.diff(positions, prepend=-1) - 1)


def shorten(gaps: NDArray[np.integer]) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """A byte each, and what the escaped ones have beyond it."""
    escaped = gaps[gaps >= ESCAPE] - ESCAPE
    return np.minimum(gaps, ESCAPE).astype(np.uint8), escaped.astype(np.uint32)


def lengthen(gaps: NDArray[np.uint8], escaped: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The inverse of `shorten`; gaps below 2^32 - 255 come back, larger ones wrap and are found to lie outside."""
    wide = gaps.astype(np.uint32)
    wide[gaps == ESCAPE] += escaped
    return wide


def escapes_in(gaps: NDArray[np.uint8]) -> int:
    """How many entries the escape stream must have."""
    return int(np.count_nonzero(gaps == ESCAPE))


def decode(gaps: NDArray[np.uint8], escaped: NDArray[np.uint32], elements: int) -> NDArray[np.int64]:
    """The positions, all below `elements`. Raises WireError when one would not be."""
    strides = gaps.astype(np.int64) + 1
    if len(escaped):
        strides[gaps == ESCAPE] += escaped
    positions = np.cumsum(strides) - 1
    if len(positions) and positions[-1] >= elements:
        raise WireError(f"changed position {positions[-1]} in a block of {elements} elements")
    return positions
