"""F32, F16 and BF16 as bits: casts that round to nearest even, as torch does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forebay.wire.dtype import Bits

CASTABLE = ("BF16", "F16", "F32")
_QUIET_NAN = np.uint32(0x7FC0)


def cast(bits: Bits, source: str, target: str) -> Bits:
    """`bits` [n] of type `source` as bits of type `target`; both in CASTABLE."""
    return bits if source == target else _narrow(_widen(bits, source), target)


def _widen(bits: Bits, source: str) -> NDArray[np.float32]:
    """Exact: every F16 and BF16 is an F32."""
    if source == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32) if source == "F16" else bits.view(np.float32)


def _narrow(values: NDArray[np.float32], target: str) -> Bits:
    if target == "BF16":
        return _bf16(values)
    with np.errstate(over="ignore"):  # beyond F16's range is infinity, as everywhere
        return values.astype(np.float16).view(np.uint16) if target == "F16" else values.view(np.uint32)


def _bf16(values: NDArray[np.float32]) -> Bits:
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), _QUIET_NAN, rounded).astype(np.uint16)
