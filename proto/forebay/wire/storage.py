"""The storage batch: one Arrow row, whose schema is fixed by the frame's schema version.

`forebay.wire.columns` says what the columns mean. A column of bytes is written as streams, and read as one array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.wire import arrow_message
from forebay.wire.errors import WireError

Bytes = NDArray[np.uint8]

_BYTES = ("words", "floats", "tokens", "logprobs")
_SCHEMA = pa.schema(
    [
        pa.field("origin", pa.uint64()),  # checksum of the header's own facts
        *(pa.field(name, pa.binary()) for name in _BYTES),
        pa.field("texts", pa.list_(pa.field("item", pa.string()))),
    ]
)
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """The columns of one frame, but for its origin. `texts` is a list to write, an Arrow array when read."""

    words: Sequence[Bytes]
    floats: Sequence[Bytes]
    tokens: Sequence[Bytes]
    logprobs: Sequence[Bytes]
    texts: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """An Arrow message, and where its larger streams begin and end: there a compressor does well to start anew."""

    content: bytes
    edges: tuple[int, ...]


def pack(origin: int, columns: Columns) -> Packed:
    """The message of one storage row. Raises WireError for what the types cannot hold."""
    try:
        texts = pa.array([columns.texts], _SCHEMA.field("texts").type)
    except (UnicodeEncodeError, pa.ArrowException) as error:
        raise WireError(f"a value that the schema cannot hold: {error}") from error
    streams = {name: getattr(columns, name) for name in _BYTES}
    arrays = [pa.array([origin], pa.uint64()), *map(_binary, streams.values()), texts]
    content = arrow_message.write(pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA))
    return Packed(content=content, edges=tuple(_edges(len(content), arrays, list(streams.values()))))


def unpack(content: bytes) -> tuple[int, Columns]:
    """(origin, columns), fully validated. Raises WireError."""
    batch = arrow_message.read(content, _SCHEMA)
    if batch.num_rows != 1 or any(column.null_count for column in batch.columns):
        raise WireError(f"storage batch of {batch.num_rows} rows, expected 1 without nulls")
    texts = batch.column("texts").flatten()
    if texts.null_count:
        raise WireError("nulls in texts")
    streams = {name: [_bytes(batch.column(name))] for name in _BYTES}
    return batch.column("origin")[0].as_py(), Columns(**streams, texts=texts)


def _binary(streams: Sequence[Bytes]) -> pa.Array:
    content = np.concatenate(streams)
    offsets = pa.py_buffer(np.array([0, len(content)], np.int32))
    return pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(content)])


def _bytes(column: pa.Array) -> Bytes:
    content = column[0].as_buffer()
    return np.frombuffer(content, np.uint8) if content.size else np.zeros(0, np.uint8)


def _edges(content_bytes: int, arrays: Sequence[pa.Array], streams: Sequence[Sequence[Bytes]]) -> Iterator[int]:
    """Arrow writes the buffers of all columns one after another, each aligned, at the end of the message."""
    own = [[_aligned(buffer.size) if buffer else 0 for buffer in array.buffers()] for array in arrays]
    at = content_bytes - sum(map(sum, own)) + sum(own[0])
    for sizes, parts in zip(own[1:], streams, strict=False):
        position = at + sum(sizes[:2])
        for part in parts:
            yield position
            position += len(part)
        yield position
        at += sum(sizes)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
