"""Loss masks as run lengths: true, false, true, ... of each member; the last run is implied, the first may be 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forebay.wire.errors import WireError

Counts = NDArray[np.int64]


def encode(mask: NDArray[np.bool_], lengths: Counts) -> tuple[Counts, Counts]:
    """(how many runs of each member [n], the runs) of masks laid one after another, as `lengths` says."""
    starts = np.cumsum(lengths) - lengths
    previous = np.concatenate([[True], mask[:-1]])
    previous[starts] = True
    edges = np.flatnonzero(mask != previous)
    rows = np.searchsorted(starts, edges, side="right") - 1
    counts = np.bincount(rows, minlength=len(lengths))
    since = np.concatenate([[0], edges[:-1]])
    firsts = np.cumsum(counts) - counts
    since[firsts[counts > 0]] = starts[counts > 0]
    return counts, edges - since[: len(edges)]


def decode(counts: Counts, runs: Counts, lengths: Counts) -> NDArray[np.bool_]:
    """The inverse of `encode`. Raises WireError when the runs do not fit the lengths."""
    if not len(runs):
        return np.ones(int(lengths.sum()), np.bool_)
    sums = np.concatenate([[0], np.cumsum(runs)])
    ends = np.cumsum(counts)
    last = lengths - (sums[ends] - sums[ends - counts])
    if last.min() < 1:
        raise WireError("a loss mask is longer than its tokens")
    segments = np.zeros(len(runs) + len(lengths), np.int64)
    closes = ends + np.arange(len(lengths))
    is_run = np.ones(len(segments), np.bool_)
    is_run[closes] = False
    segments[is_run], segments[closes] = runs, last
    place = np.arange(len(segments)) - np.repeat(closes - counts, counts + 1)
    return np.repeat(place % 2 == 0, segments)
