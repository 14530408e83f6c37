"""The storage batch: one Arrow row whose columns are lists, each as long as its kind asks for.

The schema is fixed by the frame's schema version. `forebay.wire.columns` says what the columns mean together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.wire import arrow_message
from forebay.wire.errors import WireError

#: numpy arrays; lists of str for texts
Columns: TypeAlias = Mapping[str, Any]

FLOATS = ("temperature", "top_p", "reward", "generated_s", "scored_s")
TEXTS = ("finish_reason", "trace", "metadata")
_TYPES: dict[str, pa.DataType] = {
    "origin": pa.string(),  # codec, run, sampler, fleet, region
    "origin_numbers": pa.uint64(),  # incarnation, sequence
    "group_ids": pa.uint64(),
    "attempts": pa.uint32(),
    "group_members": pa.uint32(),
    "prompt_lengths": pa.uint32(),
    "members": pa.uint32(),
    "lengths": pa.uint32(),  # tokens of each member
    "shared": pa.uint32(),  # leading tokens equal to those of the member before, not stored again
    "token_planes": pa.uint8(),  # of the prompts, then of what is not shared
    "logprob_planes": pa.uint8(),
    "logprob_offset": pa.int64(),
    "run_counts": pa.uint32(),  # of each member's loss mask
    "runs": pa.uint32(),  # lengths of true, false, true, ...; each member's last one is implied
    "span_counts": pa.uint32(),
    "span_starts": pa.uint32(),
    "span_incarnations": pa.uint32(),
    "span_steps": pa.uint32(),
    **{name: pa.float64() for name in FLOATS},
    **{name: pa.string() for name in TEXTS},
    "part_counts": pa.uint32(),
    "part_names": pa.string(),
    "part_values": pa.float64(),
}
_SCHEMA = pa.schema([pa.field(name, pa.list_(pa.field("item", kind))) for name, kind in _TYPES.items()])


def pack(columns: Columns) -> bytes:
    """The Arrow message of one storage row. Raises WireError for what the types cannot hold."""
    try:
        lists = [_one_list(columns[name], kind) for name, kind in _TYPES.items()]
    except (UnicodeEncodeError, OverflowError, pa.ArrowException) as error:
        raise WireError(f"a value that the schema cannot hold: {error}") from error
    return arrow_message.write(pa.RecordBatch.from_arrays(lists, schema=_SCHEMA))


def unpack(content: bytes) -> dict[str, Any]:
    """The columns, fully validated. Raises WireError."""
    batch = arrow_message.read(content, _SCHEMA)
    if batch.num_rows != 1:
        raise WireError(f"storage batch of {batch.num_rows} rows, expected 1")
    return {name: _unlist(name, column) for name, column in zip(_TYPES, batch.columns, strict=True)}


def as_counts(column: NDArray[Any], entries: int, name: str) -> NDArray[np.int64]:
    """A column that must have `entries` entries, as int64. Raises WireError."""
    if len(column) != entries:
        raise WireError(f"{len(column)} entries of {name}, expected {entries}")
    return column.astype(np.int64)


def _one_list(values: NDArray[Any] | Sequence[Any], kind: pa.DataType) -> pa.ListArray:
    content = pa.array(values, kind)
    return pa.ListArray.from_arrays(
        pa.array([0, len(content)], pa.int32()), content, type=pa.list_(pa.field("item", kind))
    )


def _unlist(name: str, column: pa.ListArray) -> NDArray[Any] | list[str]:
    content = column.flatten()
    if column.null_count or content.null_count:
        raise WireError(f"nulls in {name}")
    if pa.types.is_string(content.type):
        texts: list[str] = content.to_pylist()
        return texts
    numbers: NDArray[Any] = content.to_numpy(zero_copy_only=True)
    return numbers
