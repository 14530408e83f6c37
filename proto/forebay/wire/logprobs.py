"""Behaviour log-probabilities as bytes: every bit ("exact"), or the nearest of a fine grid ("compact")."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forebay.wire import planes
from forebay.wire.errors import WireError

EXACT = "exact"
COMPACT = "compact"
COMPACT_BOUND = 2.0**-8  #: largest error of a log-probability, part of the schema
_GRID = 128.0  #: grid points a nat: half their distance is the bound
_LARGEST = 2.0**16  #: magnitude; float32 still holds every grid point up to here exactly
_U4 = np.dtype("<u4")


def encode(logprobs: NDArray[np.float32], form: str) -> tuple[NDArray[np.uint8], int]:
    """(byte planes, offset) of log-probabilities [n]. Raises WireError when `compact` cannot keep its bound."""
    if form == EXACT:
        return np.concatenate(planes.split(logprobs.view(_U4), rotate=True)), 0
    if not np.all(np.abs(logprobs) <= _LARGEST):
        raise WireError(f"a log-probability that is not within ±{_LARGEST:g}: only the exact codec holds it")
    grid = np.rint(logprobs.astype(np.float64) * -_GRID).astype(np.int64)
    offset = int(grid.min())
    return planes.narrow((grid - offset).astype(_U4)), offset


def decode(data: NDArray[np.uint8], offset: int, count: int, form: str) -> NDArray[np.float32]:
    """Log-probabilities [count]. Raises WireError."""
    if form == EXACT:
        if len(data) != 4 * count:
            raise WireError(f"{len(data)} bytes of exact log-probabilities for {count} tokens")
        return planes.join(list(data.reshape(4, count)), _U4, rotate=True).view(np.float32)
    if abs(offset) > _LARGEST * _GRID:
        raise WireError(f"log-probability offset {offset}")
    words = planes.widen(data, count)
    return ((words.astype(np.int64) + offset) / -_GRID + 0.0).astype(np.float32)
