"""Trajectories, frames and weights for the wire tests, and what it takes to tamper with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.wire import bounded_zstd
from forebay.wire.digest import digest_of
from forebay.wire.experience import encode_frame
from forebay.wire.frame_header import checksum
from forebay.wire.host_state import HostState, TensorSpec
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version
from forebay.wire.weights import Encoded

SENDER: dict[str, Any] = {
    "run": "run",
    "sampler": "s0",
    "fleet": "edge",
    "region": "eu",
    "incarnation": 2,
    "sequence": 7,
}
OLD, NEW = Version(1, 4), Version(1, 5)


def trajectory(**changes: Any) -> Trajectory:
    """A short plain trajectory; any field can be given."""
    length = len(changes.get("tokens", range(4)))
    plain: dict[str, Any] = {
        "group_id": 1,
        "member": 0,
        "prompt_tokens": np.array([5, 6, 7], np.int32),
        "tokens": np.arange(length, dtype=np.int32),
        "loss_mask": np.ones(length, np.bool_),
        "logprobs": np.linspace(-2, -0.01, length).astype(np.float32),
        "spans": (VersionSpan(start=0, version=OLD),),
        "temperature": 1.0,
        "top_p": 1.0,
        "reward": 1.0,
    }
    return Trajectory(**{**plain, **changes})


def frame_of(trajectories: Sequence[Trajectory], codec: str = "zstd+exact", **changes: Any) -> experience_pb2.Frame:
    """A frame with every group at attempt 1."""
    attempts = {trajectory.group_id: 1 for trajectory in trajectories}
    return encode_frame(trajectories, **{"attempts": attempts, "codec": codec, **SENDER, **changes})


def facts(trajectory: Trajectory) -> tuple[Any, ...]:
    """Everything in a trajectory, comparable bit for bit: NaN equals itself, -0.0 differs from 0.0."""
    plain = ("group_id", "member", "spans", "finish_reason", "trace", "metadata")
    arrays = ("prompt_tokens", "tokens", "loss_mask", "logprobs")
    numbers = ("temperature", "top_p", "reward", "generated_s", "scored_s")
    return (
        *(getattr(trajectory, name) for name in plain),
        *(np.asarray(getattr(trajectory, name)).tobytes() for name in arrays),
        *(np.float64(getattr(trajectory, name)).tobytes() for name in numbers),
        [(name, np.float64(value).tobytes()) for name, value in trajectory.reward_parts.items()],
    )


def resealed(frame: experience_pb2.Frame, content: bytes, payload: bytes | None = None) -> experience_pb2.Frame:
    """The frame with other content, its sizes and checksum made to fit: what a hostile sender would do."""
    changed = experience_pb2.Frame()
    changed.CopyFrom(frame)
    changed.payload = bounded_zstd.compress(content, 3) if payload is None else payload
    changed.header.payload_bytes, changed.header.uncompressed_bytes = len(changed.payload), len(content)
    changed.header.payload_xxh3 = checksum(changed.payload)
    return changed


def content_of(frame: experience_pb2.Frame) -> bytes:
    """The Arrow message inside."""
    return bounded_zstd.decompress(frame.payload, frame.header.uncompressed_bytes)


def state_of(tensors: dict[str, tuple[str, tuple[int, ...], NDArray[Any]]]) -> HostState:
    """A state from name: (dtype, shape, bits or bytes)."""
    state = HostState.allocate(TensorSpec(name=n, dtype=d, shape=s) for n, (d, s, _) in tensors.items())
    for name, (_, _, bits) in tensors.items():
        target = state.open_for_update(name)
        target[:] = bits.view(target.dtype)
    return state


def copy_of(state: HostState, change: Callable[[str, NDArray[Any]], None] = lambda name, bits: None) -> HostState:
    """A copy, each tensor's bits handed to `change`."""
    other = HostState.allocate(state.specs)
    other.copy_from(state)
    for name in other.names:
        change(name, other.open_for_update(name))
    return other


def tampered(encoded: Encoded, payload: bytes) -> Encoded:
    """Same tensors, another payload of the same length, chunk digests made to fit."""
    changed = Encoded(manifest=type(encoded.manifest)(), chunks={})
    changed.manifest.CopyFrom(encoded.manifest)
    at = 0
    for chunk in changed.manifest.chunks:
        data = payload[at : at + chunk.bytes]
        chunk.digest = digest_of(data)
        changed.chunks[chunk.digest] = data
        at += chunk.bytes
    return changed


def flipped(data: bytes, bit: int) -> bytes:
    """`data` with one bit turned over."""
    turned = bytearray(data)
    turned[bit // 8] ^= 1 << bit % 8
    return bytes(turned)


def concatenated(parts: Iterable[NDArray[Any]]) -> bytes:
    """All bytes of some arrays."""
    return b"".join(part.tobytes() for part in parts)
