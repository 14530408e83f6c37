"""Element types by their safetensors spelling: widths and integer views, no arithmetic."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from forebay.wire.errors import WeightsError

Bits: TypeAlias = NDArray[np.unsignedinteger]  #: elements as unsigned integers, shape [n]

_NAMED_BITS = {"BOOL": 8}
_UNITS: dict[int, np.dtype[np.unsignedinteger]] = {
    8: np.dtype("<u1"),
    16: np.dtype("<u2"),
    32: np.dtype("<u4"),
    64: np.dtype("<u8"),
}


@lru_cache
def bits_per_element(dtype: str) -> int:
    """Width in bits: the number in the name. Raises WeightsError for a name without one."""
    found = re.fullmatch(r"[A-Z]+(\d{1,3})(_\w+)?", dtype)
    bits = _NAMED_BITS.get(dtype) or (int(found[1]) if found else 0)
    if not bits:
        raise WeightsError(f"dtype {dtype!r}: expected a safetensors name such as BF16 or F32")
    return bits


def unit(dtype: str) -> np.dtype[np.unsignedinteger]:
    """The unsigned integer that holds one element; bytes for widths that have none (F4, F6_E2M3, C128)."""
    return _UNITS.get(bits_per_element(dtype), _UNITS[8])


@lru_cache
def is_float(dtype: str) -> bool:
    """True for sign-magnitude formats, whose integer view can be put in numerical order."""
    return dtype.startswith(("F", "BF")) and bits_per_element(dtype) in _UNITS


def exponent_shift(dtype: str) -> int:
    """How far right a float's magnitude must go for its exponent to be left (of F64, the upper 8 bits of it)."""
    return {"BF16": 7, "F16": 10, "F32": 23, "F64": 55, "F8_E5M2": 2}.get(dtype, 3)
