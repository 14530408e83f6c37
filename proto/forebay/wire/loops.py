"""What the inner loops over weights give, and which of the two makes is in use."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from forebay.wire.dtype import Bits
from forebay.wire.errors import WireError
from forebay.wire.fingerprint import Sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Difference:
    """Where and how far `changed` elements moved."""

    gaps: NDArray[np.uint8]  #: [changed]
    escapes: NDArray[np.uint32]  #: gap - 255 of each gap of 255 or more
    steps: Bits  #: [changed] zig-zag ULP steps
    change: Sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassDifference:
    """The same, class after class (`forebay.wire.classes`), the rest last."""

    bounds: NDArray[np.int64]  #: [classes - 1] exponents
    counts: NDArray[np.int64]  #: [classes] changed elements
    gaps: NDArray[np.uint32]  #: [changed] elements of the class skipped; in the rest, of the whole block
    steps: Bits  #: [changed]


@cache
def loops() -> ModuleType:
    """`forebay.wire.compiled` where numba is installed (it comes with the sampler and learner), else `plain`."""
    if importlib.util.find_spec("numba") is None:
        from forebay.wire import plain

        return plain
    from forebay.wire import compiled

    return compiled


def outside(position: int, elements: int) -> WireError:
    """What a position beyond the block is refused with."""
    return WireError(f"changed position {position} in a block of {elements} elements")
