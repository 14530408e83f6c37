"""Which elements of a block are counted among their likes: classes of the old value's magnitude.

An optimizer moves all weights by about as much, so small ones change in their last bits far more often than large ones.
Magnitudes (the bits without the sign) are cut at a few exponents into classes; the receiver knows the old values and so
the classes. What lies above the last bound is the rest: too many elements to count, changed too seldom to gain by it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_CLASSES = 8  #: the rest included
EXPONENTS = 256
_WORTH = 100  #: a bound must save one part in so many of what positions cost
_SURVEY = 1 << 16  #: elements up to which all are counted; of more, every sixteenth line
#: 256 log2(1 + i / 256), rounded: with integers every machine cuts alike.
LOGS = np.round(256 * np.log2(1 + np.arange(256) / 256)).astype(np.int64)


def stride(elements: int) -> int:
    """Every how many 64-byte lines are looked at to see how common an exponent is."""
    return 1 if elements <= _SURVEY else 16


def cut(changed: NDArray[np.int64], present: NDArray[np.int64], logs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bounds between classes, ascending exponents, none when counting all together is as good.

    `changed` and `present` say how many elements of each exponent [256] changed and are there (about). Neighbours are
    merged as long as that costs next to nothing, and until few enough are left. Numba compiles this very function.
    """

    def log(value: int) -> int:
        """256 log2; 0 of 0."""
        bits = 0
        while value >> (bits + 1):
            bits += 1
        return 256 * bits + int(logs[((value << 8) >> bits) - 256]) if value else 0

    def cost(hits: int, size: int) -> int:
        """1/256 bits that say which `hits` of `size` elements changed: size times the entropy of the share."""
        return size * log(size) - hits * log(hits) - (size - hits) * log(size - hits)

    ends, costs = np.zeros(EXPONENTS, np.int64), np.zeros(EXPONENTS, np.int64)
    hits, sizes = np.zeros(EXPONENTS, np.int64), np.zeros(EXPONENTS, np.int64)
    count = 0
    for exponent in range(EXPONENTS):
        if present[exponent] or changed[exponent]:
            ends[count], hits[count] = exponent + 1, changed[exponent]
            sizes[count] = max(present[exponent], changed[exponent])
            costs[count] = cost(hits[count], sizes[count])
            count += 1
    while count > 1:
        best, least = 0, np.int64(1 << 62)
        for k in range(count - 1):
            more = cost(hits[k] + hits[k + 1], sizes[k] + sizes[k + 1]) - costs[k] - costs[k + 1]
            if more < least:
                best, least = k, more
        if count <= MAX_CLASSES and least * _WORTH > costs[:count].sum():
            break
        costs[best], ends[best] = costs[best] + costs[best + 1] + least, ends[best + 1]
        hits[best], sizes[best] = hits[best] + hits[best + 1], sizes[best] + sizes[best + 1]
        for k in range(best + 1, count - 1):
            ends[k], hits[k], sizes[k], costs[k] = ends[k + 1], hits[k + 1], sizes[k + 1], costs[k + 1]
        count -= 1
    return ends[: max(count - 1, 0)].copy()
