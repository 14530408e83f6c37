"""Token ids as streams of bytes, in whichever of two forms zstd makes less of.

words   1 .. 4: so many bytes a token, low byte first: repeated phrases stay in one piece for zstd to find
common  17 .. 20: a byte a token names one of the 255 ids that the frame has most of, 255 any other, which follows in
        byte planes: closer to the ids' entropy where phrases do not repeat
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forebay.wire import bounded_zstd, planes
from forebay.wire.errors import WireError

Bytes = NDArray[np.uint8]

_COMMON = 16  #: added to the width
_OTHER = 255
_MIN_TOKENS = 512  #: below it the list of common ids costs more than it saves
_MAX_ID = 1 << 20  #: above it counting takes more memory than it is worth
_TRIED = 4096  #: tokens that both forms are tried on
_TRIAL_LEVEL = 1
_U4 = np.dtype("<u4")


def encode(ids: NDArray[np.uint32]) -> list[Bytes]:
    """Streams of ids [n]."""
    largest = int(ids.max(initial=0))
    if largest < 256 or len(ids) < _MIN_TOKENS or largest >= _MAX_ID:
        return _as_words(ids)
    middle = max(0, len(ids) - _TRIED) // 2
    sample = ids[middle : middle + _TRIED]
    words, common = _as_words(sample), _as_common(sample)
    better = common if _compressed_bytes(common) < _compressed_bytes(words) else words
    if len(sample) == len(ids):
        return better
    return _as_common(ids) if better is common else _as_words(ids)


def decode(data: Bytes, count: int) -> NDArray[np.uint32]:
    """Ids [count] from the streams, one after another. Raises WireError."""
    if not len(data):
        raise WireError("token ids without their form")
    form, content = int(data[0]), data[1:]
    if 1 <= form <= 4:
        return _from_words(content, count, form)
    if 1 <= form - _COMMON <= 4:
        return _from_common(content, count, form - _COMMON)
    raise WireError(f"token ids of form {form}")


def _as_words(ids: NDArray[np.uint32]) -> list[Bytes]:
    width = planes.width(ids)
    table = ids.astype(_U4, copy=False).view(np.uint8).reshape(-1, 4)[:, :width]
    return [np.array([width], np.uint8), np.ascontiguousarray(table).reshape(-1)]


def _from_words(content: Bytes, count: int, width: int) -> NDArray[np.uint32]:
    if len(content) != width * count:
        raise WireError(f"{len(content)} bytes of token ids for {count} tokens")
    table = np.zeros((count, 4), np.uint8)
    table[:, :width] = content.reshape(count, width)
    return table.reshape(-1).view(_U4)


def _as_common(ids: NDArray[np.uint32]) -> list[Bytes]:
    places = ids.astype(np.intp)
    counts = np.bincount(places)
    common = np.flatnonzero(counts)
    if len(common) > _OTHER:
        common = np.sort(common[np.argpartition(counts[common], -_OTHER)[-_OTHER:]])
    code_of = np.full(len(counts), _OTHER, np.uint8)
    code_of[common] = np.arange(len(common))
    codes = code_of.take(places)
    others, gaps = ids.take(np.flatnonzero(codes == _OTHER)), np.diff(common, prepend=0).astype(_U4)
    width = max(planes.width(others), planes.width(gaps))
    head = np.array([_COMMON + width, len(common)], np.uint8)
    gap_planes, other_planes = (planes.split(words, rotate=False, count=width) for words in (gaps, others))
    return [head, *gap_planes, codes, *other_planes]


def _from_common(content: Bytes, count: int, width: int) -> NDArray[np.uint32]:
    listed = int(content[0]) if len(content) else 0
    at = 1 + width * listed
    codes = content[at : at + count]
    if not 1 <= listed <= _OTHER or len(codes) != count:
        raise WireError(f"{len(content)} bytes of token ids for {count} tokens")
    table = np.zeros(_OTHER + 1, _U4)
    table[:listed] = np.cumsum(planes.widen(content[1:at], listed), dtype=_U4)
    ids = table.take(codes)
    others = np.flatnonzero(codes == _OTHER)
    ids[others] = planes.widen(content[at + count :], len(others))
    return ids


def _compressed_bytes(streams: list[Bytes]) -> int:
    return sum(len(bounded_zstd.compress(stream, _TRIAL_LEVEL)) for stream in streams)
