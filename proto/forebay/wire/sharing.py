"""What a member shares with the one before it in its group: the first tokens, or their log-probabilities.

All arrays are flat: the members' entries one after another, as `lengths` says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.wire.errors import WireError

Counts = NDArray[np.int64]


def before(lengths: Counts, sizes: Counts) -> Counts:
    """Length of the member before each in its group; 0 for a group's first. `sizes`: members of each group."""
    found = np.concatenate([[0], lengths[:-1]])
    found[np.cumsum(sizes) - sizes] = 0
    return found


def common(flat: NDArray[Any], lengths: Counts, sizes: Counts, at_most: Counts | None = None) -> Counts:
    """How many leading entries each member shares with the one before it, `at_most` where given."""
    limits = np.minimum(lengths, before(lengths, sizes) if at_most is None else at_most)
    rows = np.flatnonzero(limits)
    counts = np.zeros(len(lengths), np.int64)
    if len(rows):
        places = _leading(lengths, limits)
        differs = flat[places] != flat[places - np.repeat(lengths[rows - 1], limits[rows])]
        starts = np.cumsum(limits[rows]) - limits[rows]
        offsets = np.arange(len(places)) - np.repeat(starts, limits[rows])
        first = np.where(differs, offsets, np.repeat(limits[rows], limits[rows]))
        counts[rows] = np.minimum.reduceat(first, starts)
    return counts


def rest(flat: NDArray[Any], lengths: Counts, shared: Counts) -> NDArray[Any]:
    """`flat` without what is shared."""
    if not shared.any():
        return flat
    kept = np.ones(len(flat), np.bool_)
    kept[_leading(lengths, shared)] = False
    return flat[kept]


def whole(stored: NDArray[Any], lengths: Counts, shared: Counts) -> NDArray[Any]:
    """The inverse of `rest`. `shared` has passed `check`."""
    if not shared.any():
        return stored
    flat = np.empty(int(lengths.sum()), stored.dtype)
    kept = np.ones(len(flat), np.bool_)
    places = _leading(lengths, shared)
    kept[places] = False
    flat[kept] = stored
    rows = np.flatnonzero(shared)
    flat[places] = flat[_sources(places, np.repeat(lengths[rows - 1], shared[rows]), kept)]
    return flat


def check(shared: Counts, lengths: Counts, sizes: Counts) -> None:
    """Raises WireError when a member shares what is not there."""
    if np.any(shared > np.minimum(lengths, before(lengths, sizes))):
        raise WireError("a member shares more tokens than it or the one before it has")


def _leading(lengths: Counts, counts: Counts) -> Counts:
    """Places of each member's first `counts` entries."""
    starts = np.cumsum(lengths) - lengths
    firsts = np.cumsum(counts) - counts
    places: Counts = np.arange(int(counts.sum())) + np.repeat(starts - firsts, counts)
    return places


def _sources(places: Counts, back: Counts, kept: NDArray[np.bool_]) -> Counts:
    """Where each shared entry is really stored: chains of members are followed in doubling steps."""
    sources = np.arange(len(kept))
    sources[places] -= back
    while not kept[sources[places]].all():
        sources[places] = sources[sources[places]]
    return sources[places]
