"""How others send updates, as bytes: what a system described in its paper, code or issues would put on the wire.

    int32_bf16         index (int32) and new value of each changed element, as they are (TRL, NVIDIA NeMo-RL)
    int32_bf16_zstd    the same through zstd-1, indices and values apart
    u16_gap_bf16_zstd  gaps (uint16, 65535 an escape followed by the rest as int32) and new values, zstd-1 each
    xor_zstd           the whole tensor XOR its base through zstd-1 (slime)

One tensor at a time, each stream compressed on its own; names and shapes are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import zstandard

from forebay.wire.host_state import HostState

Bits = Any


def sizes(base: HostState, new: HostState) -> dict[str, int]:
    """Bytes of the whole update in every format."""
    total = dict.fromkeys(FORMATS, 0)
    for name in new.names:
        old, fresh = base.view_of(name), new.view_of(name)
        positions = np.flatnonzero(old != fresh)
        for form, size in FORMATS.items():
            total[form] += size(old, fresh, positions) if len(positions) else 0
    return total


def _int32_bf16(old: Bits, fresh: Bits, positions: Bits) -> int:
    return len(positions) * (4 + fresh.itemsize)


def _int32_bf16_zstd(old: Bits, fresh: Bits, positions: Bits) -> int:
    return _zstd(positions.astype(np.int32)) + _zstd(fresh[positions])


def _u16_gap_bf16_zstd(old: Bits, fresh: Bits, positions: Bits) -> int:
    gaps = np.diff(positions, prepend=-1) - 1
    escaped = gaps[gaps >= 65535].astype(np.int32)
    return _zstd(np.minimum(gaps, 65535).astype(np.uint16)) + _zstd(escaped) + _zstd(fresh[positions])


def _xor_zstd(old: Bits, fresh: Bits, positions: Bits) -> int:
    return _zstd(old ^ fresh)


def _zstd(values: Bits) -> int:
    return len(zstandard.ZstdCompressor(level=1).compress(values.tobytes())) if len(values) else 0


FORMATS: Mapping[str, Callable[[Bits, Bits, Bits], int]] = {
    "int32_bf16": _int32_bf16,
    "int32_bf16_zstd": _int32_bf16_zstd,
    "u16_gap_bf16_zstd": _u16_gap_bf16_zstd,
    "xor_zstd": _xor_zstd,
}
