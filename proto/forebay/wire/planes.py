"""Byte planes: the k-th bytes of all elements side by side, where a byte-wise entropy coder sees what they share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.wire.dtype import Bits
from forebay.wire.errors import WireError

_U4 = np.dtype("<u4")


def split(bits: Bits, *, rotate: bool) -> list[NDArray[np.uint8]]:
    """Planes from the lowest byte up, each shape [n]. `rotate` moves the sign bit to the low end.

    After it bf16's upper byte is exactly its exponent, its lower one mantissa and sign (ZipNN, arXiv 2411.05239).
    """
    width = bits.itemsize
    turned = (bits << 1) | (bits >> (8 * width - 1)) if rotate else np.ascontiguousarray(bits)
    table = turned.view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(table[:, k]) for k in range(width)]


def join(planes: Sequence[NDArray[np.uint8]], dtype: np.dtype[np.unsignedinteger], *, rotate: bool) -> Bits:
    """The inverse of `split`: elements of `dtype`, shape [n]."""
    width = dtype.itemsize
    table = np.empty((len(planes[0]), width), np.uint8)
    for k, plane in enumerate(planes):
        table[:, k] = plane
    bits: Bits = table.reshape(-1).view(dtype)
    return np.bitwise_or(bits >> 1, bits << (8 * width - 1)) if rotate else bits


def narrow(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """The planes of `words` [n], one after another, without the upper ones that are all zero; one at least."""
    width = max(1, -(-int(words.max(initial=0)).bit_length() // 8))
    return np.concatenate(split(words, rotate=False)[:width])


def widen(data: NDArray[np.uint8], count: int) -> NDArray[np.uint32]:
    """The inverse of `narrow` for `count` > 0 words. Raises WireError."""
    width = len(data) // count if count else 0
    if not 1 <= width <= 4 or len(data) != width * count:
        raise WireError(f"{len(data)} bytes of planes for {count} numbers")
    absent = [np.zeros(count, np.uint8)] * (4 - width)
    return join([*data.reshape(width, count), *absent], _U4, rotate=False).view(_U4)
