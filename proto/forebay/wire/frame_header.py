"""What a frame's header says: made from its groups, and checked without opening the payload."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from forebay.wire.columns import MAX_TOKENS, Group
from forebay.wire.errors import FrameError
from forebay.wire.logprobs import COMPACT, EXACT
from forebay.wire.record_batch import SCHEMA_VERSION
from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version

CODECS = {f"zstd+{form}": form for form in (EXACT, COMPACT)}  #: codec name to form of the log-probabilities
MAX_FRAME_BYTES = 1 << 23
MAX_UNCOMPRESSED_BYTES = 1 << 26
MAX_RATIO = 200
MAX_GROUPS = 1 << 16
MAX_MEMBERS = 1 << 16
MAX_NAME_BYTES = 256

_FREE_BYTES = 1 << 24  #: up to here any ratio will do: short frames of equal tokens are honest and compress without end


def describe(group: Group) -> experience_pb2.GroupHeader:
    """A group as the header shows it."""
    return experience_pb2.GroupHeader(
        group_id=group.group_id,
        attempt=group.attempt,
        members=len(group.members),
        prompt_tokens=len(group.members[0].prompt_tokens),
        generated_tokens=sum(len(member.tokens) for member in group.members),
        oldest=min(member.oldest for member in group.members).to_proto(),
        newest=max(member.newest for member in group.members).to_proto(),
    )


def check_header(header: experience_pb2.FrameHeader, payload: bytes) -> None:
    """Everything that can be told of a frame without opening it. Raises FrameError."""
    _require(
        header.schema_version == SCHEMA_VERSION, f"schema version {header.schema_version}, expected {SCHEMA_VERSION}"
    )
    _require(header.codec in CODECS, f"codec {header.codec[:40]!r}, expected one of {', '.join(CODECS)}")
    for name in ("run", "sampler", "fleet", "region"):
        _require(len(getattr(header, name).encode()) <= MAX_NAME_BYTES, f"{name} longer than {MAX_NAME_BYTES} bytes")
    _check_groups(header.groups)
    check_sizes(len(payload), header.uncompressed_bytes)
    _require(header.payload_bytes == len(payload), f"payload of {len(payload)} bytes, {header.payload_bytes} declared")
    _require(header.payload_xxh3 == checksum(payload), "payload differs from its checksum")


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


def _check_groups(groups: Iterable[experience_pb2.GroupHeader]) -> None:
    seen: set[int] = set()
    prompt_tokens = generated_tokens = 0
    for group in groups:
        _require(group.group_id not in seen, f"group {group.group_id} is in the frame twice")
        _require(group.attempt >= 1, f"group {group.group_id} has no attempt")
        _require(1 <= group.members <= MAX_MEMBERS, f"group {group.group_id} of {group.members} members")
        _require(group.generated_tokens >= group.members, f"group {group.group_id} has members without tokens")
        ordered = Version.from_proto(group.oldest) <= Version.from_proto(group.newest)
        _require(ordered, f"group {group.group_id}: its oldest version is newer than its newest")
        seen.add(group.group_id)
        prompt_tokens, generated_tokens = prompt_tokens + group.prompt_tokens, generated_tokens + group.generated_tokens
    _require(1 <= len(seen) <= MAX_GROUPS, f"{len(seen)} groups")
    _require(max(prompt_tokens, generated_tokens) <= MAX_TOKENS, f"more than {MAX_TOKENS} tokens")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise FrameError(f"frame: {problem}")
