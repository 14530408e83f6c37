"""Frames of opaque rows: an honest header over random bytes, which the buffer stores and forwards unopened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.wire.experience import SCHEMA_VERSION
from forebay.wire.frame_header import checksum
from forebay.wire.v1 import common_pb2, experience_pb2
from forebay.wire.version import Version

FLEET, REGION, RUN = "bench", "here", "bench"
_SLACK_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameShape:
    """A row is one trajectory of `row_bytes`; a frame holds whole groups."""

    row_bytes: int
    group_size: int
    groups_a_frame: int

    @property
    def rows(self) -> int:
        """Of a frame."""
        return self.group_size * self.groups_a_frame

    @property
    def payload_bytes(self) -> int:
        """Of a frame."""
        return self.rows * self.row_bytes


class FrameMaker:
    """Makes the frames of one member; no two have the same payload."""

    def __init__(self, shape: FrameShape, member: common_pb2.Member, version: Version, seed: int) -> None:
        self._shape, self._member, self._version = shape, member, version.to_proto()
        self._pool = np.random.default_rng(seed).bytes(shape.payload_bytes + _SLACK_BYTES)

    def make(self, permits: Sequence[experience_pb2.Permit], sequence: int) -> experience_pb2.Frame:
        """The frame of these groups under this sequence number."""
        start = sequence % _SLACK_BYTES
        payload = self._pool[start : start + self._shape.payload_bytes]
        header = experience_pb2.FrameHeader(
            schema_version=SCHEMA_VERSION,
            codec="zstd+exact",
            run=RUN,
            sampler=self._member.id,
            fleet=FLEET,
            region=REGION,
            incarnation=self._member.incarnation,
            sequence=sequence,
            groups=[self._describe(permit) for permit in permits],
            payload_bytes=len(payload),
            uncompressed_bytes=len(payload),
            payload_xxh3=checksum(payload),
        )
        return experience_pb2.Frame(header=header, payload=payload)

    def _describe(self, permit: experience_pb2.Permit) -> experience_pb2.GroupHeader:
        return experience_pb2.GroupHeader(
            group_id=permit.group_id,
            attempt=permit.attempt,
            members=self._shape.group_size,
            prompt_tokens=16,
            generated_tokens=16 * self._shape.group_size,
            oldest=self._version,
            newest=self._version,
        )
