"""Trajectories as an ordinary Arrow table: for files, notebooks and other readers. One row a trajectory.

On the wire the same facts travel as storage columns (`forebay.wire.storage`), which compress better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.wire.errors import FrameError
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version

SCHEMA_VERSION = 1  #: of the frames that carry these rows, too

_SPAN = pa.struct([pa.field("start", pa.int32()), pa.field("incarnation", pa.uint32()), pa.field("step", pa.uint32())])
_ARRAYS = {"prompt_tokens": np.int32, "tokens": np.int32, "loss_mask": np.bool_, "logprobs": np.float32}
_ORIGIN = ("run", "sampler", "fleet", "region", "incarnation", "sequence")

SCHEMA = pa.schema(
    [
        pa.field("run", pa.string()),
        pa.field("sampler", pa.string()),
        pa.field("fleet", pa.string()),
        pa.field("region", pa.string()),
        pa.field("incarnation", pa.uint32()),
        pa.field("sequence", pa.uint64()),
        pa.field("attempt", pa.uint32()),
        pa.field("group_id", pa.uint64()),
        pa.field("member", pa.uint32()),
        pa.field("prompt_tokens", pa.list_(pa.int32())),
        pa.field("tokens", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.bool_())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("spans", pa.list_(_SPAN)),
        pa.field("temperature", pa.float64()),
        pa.field("top_p", pa.float64()),
        pa.field("reward", pa.float64()),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64())),
        pa.field("finish_reason", pa.string()),
        pa.field("generated_s", pa.float64()),
        pa.field("scored_s", pa.float64()),
        pa.field("trace", pa.string()),
        pa.field("metadata", pa.string()),
    ],
    metadata={"forebay.schema_version": str(SCHEMA_VERSION)},
)


def to_record_batch(trajectories: Sequence[Trajectory], header: experience_pb2.FrameHeader) -> pa.RecordBatch:
    """Rows of `SCHEMA` for the trajectories of one frame, with the header's facts in each. Raises KeyError when a
    trajectory's group is not in the header."""
    attempts = {group.group_id: group.attempt for group in header.groups}
    origin = {name: getattr(header, name) for name in _ORIGIN}
    rows = [{**origin, "attempt": attempts[member.group_id], **_row(member)} for member in trajectories]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def from_record_batch(batch: pa.RecordBatch) -> list[Trajectory]:
    """The trajectories of such rows. Raises FrameError for rows not of `SCHEMA` (metadata included) or not valid."""
    if not batch.schema.equals(SCHEMA, check_metadata=True):
        raise FrameError(f"rows are not of experience schema {SCHEMA_VERSION}")
    try:
        batch.validate(full=True)
        plain = batch.drop_columns(list(_ARRAYS)).to_pylist()
        arrays = zip(*(_arrays(batch.column(name), dtype) for name, dtype in _ARRAYS.items()), strict=True)
        return [
            _trajectory({**row, **dict(zip(_ARRAYS, own, strict=True))}) for row, own in zip(plain, arrays, strict=True)
        ]
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise FrameError(f"rows that hold no trajectories: {error}") from error


def _row(trajectory: Trajectory) -> dict[str, Any]:
    row = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    row["spans"] = [
        {"start": span.start, "incarnation": span.version.incarnation, "step": span.version.step}
        for span in trajectory.spans
    ]
    row["reward_parts"] = list(trajectory.reward_parts.items())
    return row


def _trajectory(row: dict[str, Any]) -> Trajectory:
    own = {field.name: row[field.name] for field in fields(Trajectory)}
    own["spans"] = tuple(
        VersionSpan(start=span["start"], version=Version(span["incarnation"], span["step"])) for span in row["spans"]
    )
    own["reward_parts"] = dict(row["reward_parts"])
    return Trajectory(**own)


def _arrays(column: pa.ListArray, dtype: type[np.generic]) -> list[NDArray[Any]]:
    """One array a row, never by way of Python floats, which would quiet a signalling NaN."""
    if column.null_count or column.flatten().null_count:
        raise ValueError("a null where an array is needed")
    whole = column.flatten().to_numpy(zero_copy_only=False).astype(dtype)
    ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
    return np.split(whole, ends[:-1]) if len(ends) else []
