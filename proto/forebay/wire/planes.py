"""Byte planes: the k-th bytes of all elements side by side, where a byte-wise entropy coder sees what they share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.wire.dtype import Bits
from forebay.wire.errors import WireError

_U4 = np.dtype("<u4")


def split(bits: Bits, *, rotate: bool, count: int | None = None) -> list[NDArray[np.uint8]]:
    """The first `count` planes (all of them) from the lowest byte up, each shape [n].

    `rotate` moves the sign bit to the low end.

    After it bf16's upper byte is exactly its exponent, its lower one mantissa and sign (ZipNN, arXiv 2411.05239).
    """
    bytes_each = bits.itemsize
    turned = (bits << 1) | (bits >> (8 * bytes_each - 1)) if rotate else np.ascontiguousarray(bits)
    table = turned.view(np.uint8).reshape(-1, bytes_each)
    return [np.ascontiguousarray(table[:, k]) for k in range(bytes_each if count is None else count)]


def join(planes: Sequence[NDArray[np.uint8]], dtype: np.dtype[np.unsignedinteger], *, rotate: bool) -> Bits:
    """The inverse of `split`: elements of `dtype`, shape [n]. Upper planes that are not given are zero."""
    bytes_each = dtype.itemsize
    make = np.empty if len(planes) == bytes_each else np.zeros
    table = make((len(planes[0]), bytes_each), np.uint8)
    for k, plane in enumerate(planes):
        table[:, k] = plane
    bits: Bits = table.reshape(-1).view(dtype)
    return np.bitwise_or(bits >> 1, bits << (8 * bytes_each - 1)) if rotate else bits


def width(words: NDArray[np.unsignedinteger]) -> int:
    """Bytes that the largest of `words` [n] takes; one at least."""
    return max(1, -(-int(words.max(initial=0)).bit_length() // 8))


def narrow(words: NDArray[np.unsignedinteger]) -> list[NDArray[np.uint8]]:
    """The planes of `words` [n] without the upper ones that are all zero; one at least."""
    return split(words, rotate=False, count=width(words))


def widen(data: NDArray[np.uint8], count: int, dtype: np.dtype[np.unsignedinteger] = _U4) -> Bits:
    """The inverse of `narrow` for `count` words, from its planes one after another. Raises WireError."""
    if not count and not len(data):
        return np.zeros(0, dtype)
    own = len(data) // count if count else 0
    if not 1 <= own <= dtype.itemsize or len(data) != own * count:
        raise WireError(f"{len(data)} bytes of planes for {count} numbers")
    return join(list(data.reshape(own, count)), dtype, rotate=False)
