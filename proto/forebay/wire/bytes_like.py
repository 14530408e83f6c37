"""Anything that holds contiguous bytes, as a flat view."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

BytesLike: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]


def flat(data: BytesLike) -> memoryview:
    """The bytes of `data` without a copy. Raises TypeError when they are not contiguous."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")
