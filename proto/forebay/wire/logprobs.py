"""Behaviour log-probabilities as streams of bytes: every bit ("exact"), or the nearest of a fine grid ("compact").

exact: a byte a token says of which kind it is and holds its upper bits; the rest of each kind follows in byte planes.
    0 .. 127    minus the logarithm of 1 + k / 2^23 (`sum_logs`): the upper bits of k; two planes of the rest
    128 .. 254  other numbers at or below -1/2: the exponent; three planes of the mantissa
    255         anything else: four planes of the whole number
compact: a byte a token, the distance from the smallest on the grid; 255 for more, which follows in byte planes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.wire import planes, sum_logs
from forebay.wire.errors import WireError

Bytes = NDArray[np.uint8]

EXACT = "exact"
COMPACT = "compact"
COMPACT_BOUND = 2.0**-8  #: largest error of a log-probability, part of the schema
_GRID = 128.0  #: grid points a nat: half their distance is the bound
_LARGEST = 2.0**16  #: magnitude; float32 still holds every grid point up to here exactly
_FAR, _ODD = 128, 255  #: first kind byte of the numbers by exponent, kind byte of the rest
_HALF = 0x17E  #: sign and exponent of -1/2
_LOG_2 = np.float32(0.6931471)  #: the last float32 below log 2
_MORE = 255
_OFFSET_BYTES = 4
_U4 = np.dtype("<u4")


def encode(logprobs: NDArray[np.float32], form: str) -> list[Bytes]:
    """Streams of log-probabilities [n]. Raises WireError when `compact` cannot keep its bound."""
    return _encode_exact(logprobs) if form == EXACT else _encode_compact(logprobs)


def decode(data: Bytes, count: int, form: str) -> NDArray[np.float32]:
    """Log-probabilities [count] from the streams, one after another. Raises WireError."""
    return _decode_exact(data, count) if form == EXACT else _decode_compact(data, count)


def _encode_exact(logprobs: NDArray[np.float32]) -> list[Bytes]:
    bits = logprobs.view(_U4)
    places, k = _sums(logprobs)
    upper = (bits >> 23) - (_HALF - _FAR)  # wraps around for what is above -1/2
    upper[(upper < _FAR) | (upper > _ODD)] = _ODD
    kinds = upper.astype(np.uint8)
    kinds[places] = k >> 16
    far, odd = (bits.take(np.flatnonzero(kind)) for kind in ((kinds >= _FAR) & (kinds < _ODD), kinds == _ODD))
    far_planes = [*planes.split(far, rotate=False, count=2), ((far >> 16) & 0x7F).astype(np.uint8)]
    return [kinds, *planes.split(k.view(_U4), rotate=False, count=2), *far_planes, *planes.split(odd, rotate=True)]


def _sums(logprobs: NDArray[np.float32]) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """(places, k) of the numbers that are exactly minus the logarithm of 1 + k / 2^23."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is no cause for alarm
        places = np.flatnonzero((logprobs <= 0) & (logprobs >= -_LOG_2))
    candidates = logprobs.take(places)
    k = sum_logs.nearest(-candidates)
    same = np.flatnonzero((np.float32(0) - sum_logs.log_of(k)).view(_U4) == candidates.view(_U4))
    return places.take(same), k.take(same)


def _decode_exact(data: Bytes, count: int) -> NDArray[np.float32]:
    kinds = data[:count]
    near, far, odd = map(np.flatnonzero, (kinds < _FAR, (kinds >= _FAR) & (kinds < _ODD), kinds == _ODD))
    if len(kinds) != count or len(data) != count + 2 * len(near) + 3 * len(far) + 4 * len(odd):
        raise WireError(f"{len(data)} bytes of exact log-probabilities for {count} tokens")
    near_planes, far_planes, odd_planes = _cut(data[count:], (len(near), len(far), len(odd)), (2, 3, 4))
    bits = np.empty(count, _U4)
    k = planes.join([*near_planes, kinds.take(near)], _U4, rotate=False).view(np.int32)
    bits[near] = (np.float32(0) - sum_logs.log_of(k)).view(_U4)
    exponents = kinds.take(far).astype(_U4) + (_HALF - _FAR)
    bits[far] = planes.join(far_planes, _U4, rotate=False) | exponents << 23
    bits[odd] = planes.join(odd_planes, _U4, rotate=True)
    return bits.view(np.float32)


def _cut(data: Bytes, counts: Sequence[int], widths: Sequence[int]) -> list[list[Bytes]]:
    ends = np.cumsum([count * width for count, width in zip(counts, widths, strict=True)]).tolist()
    parts = np.split(data, ends[:-1])
    return [list(part.reshape(width, -1)) for part, width in zip(parts, widths, strict=True)]


def _encode_compact(logprobs: NDArray[np.float32]) -> list[Bytes]:
    if not np.all(np.abs(logprobs) <= _LARGEST):
        raise WireError(f"a log-probability that is not within ±{_LARGEST:g}: only the exact codec holds it")
    grid = np.rint(logprobs * np.float64(-_GRID)).astype(np.int32)
    offset = int(grid.min(initial=0))
    words = (grid - offset).view(np.uint32)
    more = words.take(np.flatnonzero(words >= _MORE)) - _MORE
    codes = np.minimum(words, _MORE).astype(np.uint8)
    return [np.array([offset], "<i4").view(np.uint8), codes, *planes.narrow(more)]


def _decode_compact(data: Bytes, count: int) -> NDArray[np.float32]:
    codes = data[_OFFSET_BYTES : _OFFSET_BYTES + count]
    places = np.flatnonzero(codes == _MORE)
    if len(codes) != count:
        raise WireError(f"{len(data)} bytes of compact log-probabilities for {count} tokens")
    (offset,) = data[:_OFFSET_BYTES].view("<i4").tolist()
    if abs(offset) > _LARGEST * _GRID:
        raise WireError(f"log-probability offset {offset}")
    words = codes.astype(np.int64)
    words[places] += planes.widen(data[_OFFSET_BYTES + count :], len(places))
    logprobs: NDArray[np.float32] = ((words + offset) / -_GRID + 0.0).astype(np.float32)
    return logprobs
