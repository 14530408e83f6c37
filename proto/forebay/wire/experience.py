"""Experience on the wire: whole groups of trajectories in one frame.

    frame   = header (protobuf, readable by all) + payload
    payload = zstd of one Arrow record-batch message of storage columns (`forebay.wire.columns`)

The buffer checks a frame by its header and never opens the payload; the learner opens it and checks it against the
header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forebay.wire import bounded_zstd, columns, storage
from forebay.wire.columns import Group
from forebay.wire.errors import FrameError, WireError
from forebay.wire.frame_header import (
    CODECS,
    MAX_FRAME_BYTES,
    check_header,
    checksum,
    describe,
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

_LEVEL = 3


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
        groups = _grouped(trajectories, attempts)
        header.groups.extend(describe(group) for group in groups)
        content = storage.pack({**_origin(header), **columns.to_columns(groups, _form(codec))})
    except (WireError, ValueError) as error:
        raise FrameError(f"frame {sequence} of {sampler}: {error}") from error
    return _sealed(header, content)


def check_frame(frame: experience_pb2.Frame) -> None:
    """Caps, counts and checksum, from the header alone; the payload stays closed. Raises FrameError."""
    size = frame.ByteSize()
    if size > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {size} bytes, at most {MAX_FRAME_BYTES}: split it by groups")
    check_header(frame.header, frame.payload)


def decode_frame(frame: experience_pb2.Frame) -> list[Trajectory]:
    """The trajectories, group by group. Takes no more memory than the header may declare.

    Raises FrameError when anything in the payload is malformed or differs from what the header says.
    """
    check_frame(frame)
    header = frame.header
    try:
        stored = storage.unpack(bounded_zstd.decompress(frame.payload, header.uncompressed_bytes))
        _check_origin(stored, header)
        groups = columns.from_columns(stored, CODECS[header.codec])
    except FrameError:
        raise
    except WireError as error:
        raise FrameError(f"frame {header.sequence} of {header.sampler}: {error}") from error
    if [describe(group) for group in groups] != list(header.groups):
        raise FrameError(f"frame {header.sequence} of {header.sampler}: the header's groups are not the payload's")
    return [member for group in groups for member in group.members]


def _sealed(header: experience_pb2.FrameHeader, content: bytes) -> experience_pb2.Frame:
    payload = bounded_zstd.compress(content, _LEVEL)
    header.payload_bytes, header.uncompressed_bytes = len(payload), len(content)
    header.payload_xxh3 = checksum(payload)
    frame = experience_pb2.Frame(header=header, payload=payload)
    check_frame(frame)
    return frame


def _grouped(trajectories: Sequence[Trajectory], attempts: Mapping[int, int]) -> list[Group]:
    members: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        _check_trajectory(trajectory)
        members.setdefault(trajectory.group_id, []).append(trajectory)
    for group_id, group in members.items():
        _check_group(group_id, group, attempts)
    return [
        Group(group_id=group_id, attempt=attempts[group_id], members=tuple(group))
        for group_id, group in members.items()
    ]


def _check_trajectory(trajectory: Trajectory) -> None:
    length = len(trajectory.tokens)
    where = f"group {trajectory.group_id} member {trajectory.member}"
    if not length:
        raise FrameError(f"{where} has no generated tokens: refund the group instead")
    if len(trajectory.loss_mask) != length or len(trajectory.logprobs) != length:
        raise FrameError(f"{where}: {length} tokens need as many mask entries and log-probabilities")
    columns.check_spans(trajectory.spans, length)


def _check_group(group_id: int, members: Sequence[Trajectory], attempts: Mapping[int, int]) -> None:
    if group_id not in attempts:
        raise FrameError(f"group {group_id} has no permit: its attempt is unknown")
    prompt = members[0].prompt_tokens
    if not all(np.array_equal(prompt, member.prompt_tokens) for member in members[1:]):
        raise FrameError(f"group {group_id} has members with different prompts")


def _form(codec: str) -> str:
    if codec not in CODECS:
        raise FrameError(f"codec {codec!r}, expected one of {', '.join(CODECS)}")
    return CODECS[codec]


def _origin(header: experience_pb2.FrameHeader) -> dict[str, Any]:
    """The sender's part of the header, repeated inside, so that a damaged header is found."""
    return {
        "origin": [header.codec, header.run, header.sampler, header.fleet, header.region],
        "origin_numbers": np.array([header.incarnation, header.sequence], np.uint64),
    }


def _check_origin(stored: Mapping[str, Any], header: experience_pb2.FrameHeader) -> None:
    expected = _origin(header)
    if stored["origin"] != expected["origin"] or list(stored["origin_numbers"]) != list(expected["origin_numbers"]):
        raise WireError("the payload names another codec, sender or sequence")
