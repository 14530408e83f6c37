"""Experience on the wire: whole groups of trajectories in one frame.

    frame   = header (protobuf, readable by all) + payload
    payload = zstd of one Arrow record-batch message of storage columns (`forebay.wire.columns`)

The buffer checks a frame by its header and never opens the payload; the learner opens it and checks it against the
header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from forebay.wire import bounded_zstd, columns, storage
from forebay.wire.errors import FrameError, WireError
from forebay.wire.flat_groups import gather, scatter
from forebay.wire.frame_header import (
    CODECS,
    MAX_FRAME_BYTES,
    check_whole,
    checksum,
    describe,
    origin_checksum,
)
from forebay.wire.record_batch import SCHEMA, SCHEMA_VERSION, from_record_batch, to_record_batch
from forebay.wire.trajectory import Trajectory
from forebay.wire.v1 import experience_pb2

__all__ = [
    "CODECS",
    "MAX_FRAME_BYTES",
    "SCHEMA",
    "SCHEMA_VERSION",
    "FrameError",
    "check_frame",
    "decode_frame",
    "encode_frame",
    "from_record_batch",
    "to_record_batch",
]

_LEVEL = 1  #: higher ones gain less than 1 % on large frames
_SMALL_BYTES = 1 << 16
_SMALL_LEVEL = 6  #: where there is little to compress, searching longer costs little


def encode_frame(
    trajectories: Sequence[Trajectory],
    *,
    run: str,
    sampler: str,
    fleet: str,
    region: str,
    incarnation: int,
    sequence: int,
    attempts: Mapping[int, int],
    codec: str = "zstd+exact",
) -> experience_pb2.Frame:
    """One frame of whole groups, in order of first appearance; `attempts` by group id, from the permits.

    `codec` "zstd+exact" keeps every bit; "zstd+compact" moves log-probabilities by at most `logprobs.COMPACT_BOUND`.
    Raises FrameError for trajectories that must not travel (no tokens, gaps in the version spans, another prompt than
    their group's, ...) and for frames above MAX_FRAME_BYTES.
    """
    try:
        header = experience_pb2.FrameHeader(
            schema_version=SCHEMA_VERSION, codec=codec, run=run, sampler=sampler, fleet=fleet, region=region,
            incarnation=incarnation, sequence=sequence,
        )  # fmt: skip
        flat = gather(trajectories, attempts)
        table = flat.header_table()
        header.groups.extend(describe(table))
        packed = storage.pack(origin_checksum(header, table), columns.to_columns(flat, _form(codec)))
    except (WireError, ValueError) as error:
        raise FrameError(f"frame {sequence} of {sampler}: {error}") from error
    return _sealed(header, packed)


def check_frame(frame: experience_pb2.Frame) -> None:
    """Caps, counts and checksum, from the header alone; the payload stays closed. Raises FrameError."""
    check_whole(frame, frame.payload)


def decode_frame(frame: experience_pb2.Frame) -> list[Trajectory]:
    """The trajectories, group by group. Takes no more memory than the header may declare.

    Raises FrameError when anything in the payload is malformed or differs from what the header says.
    """
    header, payload = frame.header, frame.payload
    table = check_whole(frame, payload)
    try:
        origin, stored = storage.unpack(bounded_zstd.decompress(payload, header.uncompressed_bytes))
        if origin != origin_checksum(header, table):
            raise WireError("the payload belongs to another header")
        flat = columns.from_columns(stored, table, CODECS[header.codec])
        if not np.array_equal(flat.header_table(), table):
            raise WireError("the header's groups are not the payload's")
        return scatter(flat)
    except WireError as error:
        raise FrameError(f"frame {header.sequence} of {header.sampler}: {error}") from error


def _sealed(header: experience_pb2.FrameHeader, packed: storage.Packed) -> experience_pb2.Frame:
    level = _SMALL_LEVEL if len(packed.content) <= _SMALL_BYTES else _LEVEL
    payload = bounded_zstd.compress(packed.content, level, packed.edges)
    header.payload_bytes, header.uncompressed_bytes = len(payload), len(packed.content)
    header.payload_xxh3 = checksum(payload)
    frame = experience_pb2.Frame(header=header, payload=payload)
    check_frame(frame)
    return frame


def _form(codec: str) -> str:
    if codec not in CODECS:
        raise FrameError(f"codec {codec!r}, expected one of {', '.join(CODECS)}")
    return CODECS[codec]
