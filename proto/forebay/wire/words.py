"""Small whole numbers, many vectors of them in one run of byte planes. A reader knows how many come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.wire import planes
from forebay.wire.errors import WireError


def as_words(vectors: Sequence[NDArray[Any]]) -> list[NDArray[np.uint8]]:
    """Streams: the width, then so many planes of all the vectors, whose numbers are below 2^32."""
    own = planes.narrow(np.concatenate(vectors).astype(np.uint32))
    return [np.array([len(own)], np.uint8), *own]


class WordReader:
    """Reads vectors in the order in which they were written, and takes memory only for those asked for."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        """Raises WireError when `data` are not planes."""
        width = int(data[0]) if len(data) else 0
        if not 1 <= width <= 4 or (len(data) - 1) % width:
            raise WireError(f"{len(data)} bytes of words in {width} planes")
        self._planes = data[1:].reshape(width, -1)
        self._at = 0

    def rows(self, rows: int, length: int) -> NDArray[np.int64]:
        """The next `rows` vectors of `length`, shape [rows, length]. Raises WireError when there are not so many."""
        end = self._at + rows * length
        if end > self._planes.shape[1]:
            raise WireError(f"{self._planes.shape[1]} words, expected {end} or more")
        words = np.zeros(rows * length, np.int64)
        for k, plane in enumerate(self._planes):
            words |= plane[self._at : end].astype(np.int64) << (8 * k)
        self._at = end
        return words.reshape(rows, length)

    def close(self) -> None:
        """Raises WireError when there are words that nobody asked for."""
        if self._at != self._planes.shape[1]:
            raise WireError(f"{self._planes.shape[1]} words, expected {self._at}")
