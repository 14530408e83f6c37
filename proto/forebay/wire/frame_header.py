"""What a frame's header says: made from its groups, and checked without opening the payload."""

from __future__ import annotations

import struct
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from forebay.wire.columns import MAX_TOKENS
from forebay.wire.errors import FrameError
from forebay.wire.logprobs import COMPACT, EXACT
from forebay.wire.record_batch import SCHEMA_VERSION
from forebay.wire.v1 import common_pb2, experience_pb2

Table: TypeAlias = NDArray[np.uint64]

CODECS = {f"zstd+{form}": form for form in (EXACT, COMPACT)}  #: codec name to form of the log-probabilities
MAX_FRAME_BYTES = 1 << 23
MAX_UNCOMPRESSED_BYTES = 1 << 26
MAX_RATIO = 200
MAX_GROUPS = 1 << 16
MAX_MEMBERS = 1 << 16
MAX_NAME_BYTES = 256

_FREE_BYTES = 1 << 22  #: up to here any ratio will do: short frames of equal tokens are honest and compress without end


#: columns of a table of groups
GROUP_FIELDS = (
    "group_id", "attempt", "members", "prompt_tokens", "generated_tokens",
    "oldest.incarnation", "oldest.step", "newest.incarnation", "newest.step",
)  # fmt: skip
_read_group = attrgetter(*GROUP_FIELDS)


def describe(table: Table) -> list[experience_pb2.GroupHeader]:
    """Groups as the header shows them, from their table [g, 9]."""
    return [
        experience_pb2.GroupHeader(
            group_id=group_id,
            attempt=attempt,
            members=members,
            prompt_tokens=prompt_tokens,
            generated_tokens=generated_tokens,
            oldest=common_pb2.Version(incarnation=versions[0], step=versions[1]),
            newest=common_pb2.Version(incarnation=versions[2], step=versions[3]),
        )
        for group_id, attempt, members, prompt_tokens, generated_tokens, *versions in table.tolist()
    ]


def table_of(header: experience_pb2.FrameHeader) -> Table:
    """What the header says of its groups, shape [g, 9]; see GROUP_FIELDS."""
    return np.array([_read_group(group) for group in header.groups], np.uint64).reshape(-1, len(GROUP_FIELDS))


def origin_checksum(header: experience_pb2.FrameHeader, table: Table) -> int:
    """Of all that the header says but the payload's sizes: repeated inside, it finds a damaged header."""
    texts = [text.encode() for text in (header.codec, header.run, header.sampler, header.fleet, header.region)]
    numbers = (header.schema_version, header.incarnation, header.sequence, len(table), *map(len, texts))
    return checksum(struct.pack(f"<{len(numbers)}Q", *numbers) + b"".join(texts) + table.astype("<u8").tobytes())


def check_whole(frame: experience_pb2.Frame, payload: bytes) -> Table:
    """Its size, and all that `check_header` tells; `payload` is the frame's, taken out once. Raises FrameError."""
    size = frame.ByteSize()
    if size > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {size} bytes, at most {MAX_FRAME_BYTES}: split it by groups")
    return check_header(frame.header, payload)


def check_header(header: experience_pb2.FrameHeader, payload: bytes) -> Table:
    """Everything that can be told of a frame without opening it. The table of its groups. Raises FrameError."""
    _require(
        header.schema_version == SCHEMA_VERSION, f"schema version {header.schema_version}, expected {SCHEMA_VERSION}"
    )
    _require(header.codec in CODECS, f"codec {header.codec[:40]!r}, expected one of {', '.join(CODECS)}")
    for name in ("run", "sampler", "fleet", "region"):
        _require(len(getattr(header, name).encode()) <= MAX_NAME_BYTES, f"{name} longer than {MAX_NAME_BYTES} bytes")
    table = table_of(header)
    _check_groups(table)
    check_sizes(len(payload), header.uncompressed_bytes)
    _require(header.payload_bytes == len(payload), f"payload of {len(payload)} bytes, {header.payload_bytes} declared")
    _require(header.payload_xxh3 == checksum(payload), "payload differs from its checksum")
    return table


def check_sizes(payload_bytes: int, uncompressed_bytes: int) -> None:
    """What a reader will take memory for. Raises FrameError."""
    allowed = min(MAX_UNCOMPRESSED_BYTES, max(_FREE_BYTES, MAX_RATIO * payload_bytes))
    _require(
        payload_bytes <= MAX_FRAME_BYTES,
        f"payload of {payload_bytes} bytes, at most {MAX_FRAME_BYTES}: split it by groups",
    )
    _require(
        0 < uncompressed_bytes <= allowed,
        f"{payload_bytes} bytes that expand to {uncompressed_bytes}, at most {allowed}",
    )


def checksum(payload: bytes) -> int:
    """xxh3, 64 bits: finds damage, not malice."""
    return xxhash.xxh3_64_intdigest(payload)


def _check_groups(table: Table) -> None:
    ids, attempts, members, prompt_tokens, generated_tokens = (table[:, k] for k in range(5))
    _require(1 <= len(table) <= MAX_GROUPS, f"{len(table)} groups")
    _require(len(np.unique(ids)) == len(ids), "a group is in the frame twice")
    oldest, newest = (table[:, k] << np.uint64(32) | table[:, k + 1] for k in (5, 7))
    for bad, problem in (
        (attempts < 1, "has no attempt"),
        ((members < 1) | (members > MAX_MEMBERS), "has too few or too many members"),
        (generated_tokens < members, "has members without tokens"),
        (oldest > newest, "has an oldest version newer than its newest"),
        (np.maximum(prompt_tokens, generated_tokens) > MAX_TOKENS, f"has more than {MAX_TOKENS} tokens"),
    ):
        _require(not bad.any(), f"group {ids[np.argmax(bad)]} {problem}")
    _require(max(prompt_tokens.sum(), generated_tokens.sum()) <= MAX_TOKENS, f"more than {MAX_TOKENS} tokens")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise FrameError(f"frame: {problem}")
