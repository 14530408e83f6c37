"""Texts that repeat from member to member: each distinct one once, and a small number where it stands again.

A code is 0 for a text not seen before, else 1 for the newest one, 2 for the one that came before that, and so on: what
changes from group to group and what alternates both become the same few numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.wire.errors import WireError

Codes = NDArray[np.int64]


def encode(texts: Sequence[str]) -> tuple[Codes, list[str]]:
    """(codes [n], distinct texts in order of first appearance)."""
    own = list(dict.fromkeys(texts))
    place_of = {text: place for place, text in enumerate(own)}
    places = np.array(list(map(place_of.__getitem__, texts)), np.int64)
    newest = np.maximum.accumulate(places)
    is_new = np.diff(newest, prepend=-1) > 0
    return np.where(is_new, 0, 1 + newest - places), own


def distinct(codes: Codes) -> int:
    """How many distinct texts the codes speak of."""
    return int(np.count_nonzero(codes == 0))


def decode(codes: Codes, texts: list[str]) -> list[str]:
    """The inverse of `encode`. Raises WireError."""
    newest = np.cumsum(codes == 0) - 1
    places = newest - np.maximum(codes - 1, 0)
    if places.min(initial=0) < 0:
        raise WireError("a text is repeated that has not been there")
    return [texts[place] for place in places.tolist()]
