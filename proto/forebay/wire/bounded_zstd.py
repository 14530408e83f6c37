"""zstd that never takes more memory than the reader agreed to beforehand."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import pairwise

import zstandard

from forebay.wire.bytes_like import BytesLike, flat
from forebay.wire.errors import WireError

MAX_WINDOW_BYTES = 1 << 23  #: RFC 9659's bound for HTTP, taken for every frame

_MIN_BLOCK_BYTES = 1024  #: statistics of their own pay from here on

_contexts = threading.local()


def compress(data: BytesLike, level: int, edges: Iterable[int] = ()) -> bytes:
    """One zstd frame that names its content size. Empty data stay empty.

    A block ends at each of `edges` (ascending offsets) that has enough bytes on one side: bytes of different kinds,
    such as planes, are better coded apart, and what is random is then stored as it is.
    """
    content = flat(data)
    if not len(content):
        return b""
    ends = list(_block_ends(edges, len(content)))
    if len(ends) == 1:
        return _compressor(level).compress(content)
    stream = _compressor(level).compressobj(size=len(content))
    pieces: list[bytes] = []
    for start, end in pairwise([0, *ends]):
        pieces += stream.compress(content[start:end]), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return b"".join([*pieces, stream.flush()])


def _block_ends(edges: Iterable[int], size: int) -> Iterator[int]:
    last = 0
    bounds = [0, *edges, size]
    for before, edge, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        if edge > last and max(edge - before, after - edge) >= _MIN_BLOCK_BYTES:
            yield edge
            last = edge
    if last < size:
        yield size


def decompress(data: BytesLike, expected_bytes: int) -> bytes:
    """Exactly `expected_bytes`, the only size that memory is taken for. Raises WireError."""
    compressed = flat(data)
    if not len(compressed):
        if expected_bytes:
            raise WireError(f"nothing where {expected_bytes} bytes were declared")
        return b""
    try:
        parameters = zstandard.get_frame_parameters(compressed)
        if parameters.content_size != expected_bytes:
            raise WireError(f"zstd content size is not the declared {expected_bytes}")
        if parameters.window_size > MAX_WINDOW_BYTES or parameters.dict_id:
            raise WireError(f"zstd frame with a dictionary or a window above {MAX_WINDOW_BYTES} bytes")
        content = _decompressor().decompress(compressed, max_output_size=expected_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"not a zstd frame: {error}") from error
    if len(content) != expected_bytes:
        raise WireError(f"zstd content is not the declared {expected_bytes} bytes")
    return content


def _compressor(level: int) -> zstandard.ZstdCompressor:
    """Contexts are dear to make and not thread-safe: one a thread and level."""
    kept: dict[int, zstandard.ZstdCompressor] = _contexts.__dict__.setdefault("compressors", {})
    if level not in kept:
        kept[level] = zstandard.ZstdCompressor(level=level, write_content_size=True)
    return kept[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_contexts, "decompressor"):
        _contexts.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    kept: zstandard.ZstdDecompressor = _contexts.decompressor
    return kept
