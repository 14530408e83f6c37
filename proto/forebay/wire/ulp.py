"""ULP steps: how many representable values lie between two floats, as unsigned zig-zag integers.

Integer arithmetic modulo 2^width on a bijective view: exact for every bit pattern (NaN payloads, infinities, -0.0).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay.wire.dtype import Bits

_SIGNED: dict[int, Any] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}


def steps(old: Bits, new: Bits, *, is_float: bool) -> Bits:
    """Zig-zag distance from `old` to `new`: 1 is one down, 2 one up, 3 two down. Same shape and width."""
    signed = _SIGNED[old.itemsize]
    distance = (_ordered(new, is_float) - _ordered(old, is_float)).view(signed)
    zigzag: Bits = ((distance << 1) ^ (distance >> (8 * old.itemsize - 1))).view(old.dtype)
    return zigzag


def advance(old: Bits, zigzag: Bits, *, is_float: bool) -> Bits:
    """The inverse: `new` from `old` and what `steps` gave."""
    distance = np.bitwise_xor(zigzag >> 1, np.negative(zigzag & 1))
    return _unordered(np.add(_ordered(old, is_float), distance), is_float)


def _ordered(bits: Bits, is_float: bool) -> Bits:
    """Floats: an unsigned integer that grows with the value; -0.0 lies just under +0.0. Integers: as they are."""
    if not is_float:
        return bits
    return bits ^ (_sign_mask(bits) | _top_bit(bits))


def _unordered(ordered: Bits, is_float: bool) -> Bits:
    if not is_float:
        return ordered
    return ordered ^ (~_sign_mask(ordered) | _top_bit(ordered))


def _sign_mask(bits: Bits) -> Bits:
    """All ones where the top bit is set, else zero."""
    mask: Bits = (bits.view(_SIGNED[bits.itemsize]) >> (8 * bits.itemsize - 1)).view(bits.dtype)
    return mask


def _top_bit(bits: Bits) -> np.unsignedinteger:
    top: np.unsignedinteger = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return top
