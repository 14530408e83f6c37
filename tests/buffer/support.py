"""What the buffer's tests share: small runs, honest frames, a clock that is turned by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.buffer.client import BufferClient
from forebay.buffer.disk import Disk
from forebay.config.identity import run_json
from forebay.config.models import RunFile
from forebay.wire.experience import SCHEMA_VERSION, encode_frame
from forebay.wire.frame_header import checksum
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.v1 import common_pb2, experience_pb2
from forebay.wire.version import Version
from forebay.wire.weights import Encoded, HostState, TensorSpec, encode_anchor

GROUP_SIZE = 2


def make_run(
    folder: Path,
    *,
    name: str = "test",
    buffer: dict[str, Any] | None = None,
    task: dict[str, Any] | None = None,
    **learner: Any,
) -> RunFile:
    """A run of 2 groups a step, 2 trajectories a group, 4 steps, no evaluation unless said."""
    settings = {"groups_per_step": 2, "group_size": GROUP_SIZE, "steps": 4, "max_staleness": 1} | learner
    return RunFile.model_validate(
        {
            "run": {"name": name, "folder": str(folder)},
            "model": {"path": "m"},
            "task": {"name": "t", "heldout_prompts": 0} | (task or {}),
            "learner": settings,
            "buffer": buffer or {},
        }
    )


def frame_of(
    member: common_pb2.Member,
    sequence: int,
    permits: Sequence[experience_pb2.Permit],
    version: Version,
    filler: int = 0,
) -> experience_pb2.Frame:
    """A frame whose header is right and whose payload is `filler` and some bytes: the buffer never opens it."""
    payload = bytes([sequence % 251]) * (100 + filler)
    header = experience_pb2.FrameHeader(
        schema_version=SCHEMA_VERSION,
        codec="zstd+exact",
        run=member.run,
        sampler=member.id,
        fleet="fleet",
        region="here",
        incarnation=member.incarnation,
        sequence=sequence,
        payload_bytes=len(payload),
        uncompressed_bytes=len(payload),
        payload_xxh3=checksum(payload),
    )
    for permit in permits:
        header.groups.add(
            group_id=permit.group_id,
            attempt=permit.attempt,
            members=GROUP_SIZE,
            prompt_tokens=3,
            generated_tokens=10,
            oldest=version.to_proto(),
            newest=version.to_proto(),
        )
    return experience_pb2.Frame(header=header, payload=payload)


def real_frame(
    sequence: int, *, member: common_pb2.Member, permits: Sequence[experience_pb2.Permit], version: Version
) -> experience_pb2.Frame:
    """A frame as a sampler encodes it."""
    trajectories = [
        Trajectory(
            group_id=permit.group_id,
            member=index,
            prompt_tokens=np.arange(3, dtype=np.int32),
            tokens=np.full(5, permit.group_id, np.int32),
            loss_mask=np.ones(5, np.bool_),
            logprobs=np.full(5, -0.5, np.float32),
            spans=(VersionSpan(start=0, version=version),),
            temperature=1.0,
            top_p=1.0,
            reward=1.0,
        )
        for permit in permits
        for index in range(GROUP_SIZE)
    ]
    return encode_frame(
        trajectories,
        run="test",
        sampler=member.id,
        fleet="fleet",
        region="here",
        incarnation=member.incarnation,
        sequence=sequence,
        attempts={permit.group_id: permit.attempt for permit in permits},
    )


def weights(seed: int, elements: int = 5000) -> HostState:
    """A state of one BF16 tensor."""
    state = HostState.allocate([TensorSpec(name="w", dtype="BF16", shape=(elements,))])
    rng = np.random.default_rng(seed)
    state.bits_of("w")[:] = rng.integers(0x3000, 0x4000, elements, dtype=np.uint16)
    return state


def anchor(version: Version, seed: int = 0) -> Encoded:
    """An anchor of `weights(seed)`."""
    return encode_anchor(weights(seed), version=version)


async def join_learner(client: BufferClient, run: RunFile) -> common_pb2.Member:
    """A learner that starts: joined, rewound to the checkpoint, weights published."""
    joined = await client.join("learner", "learner", "", "", run_json(run))
    await client.rewind(joined.checkpoint_step)
    await client.publish(anchor(Version(joined.member.incarnation, joined.checkpoint_step)))
    return joined.member


async def join_sampler(client: BufferClient, run: RunFile, name: str = "s0") -> common_pb2.Member:
    """A sampler that starts."""
    return (await client.join("sampler", name, "fleet", "here", run_json(run))).member


async def produce(client: BufferClient, groups: int, version: Version) -> list[int]:
    """Admit and append up to `groups` groups; their ids."""
    permits = list((await client.admit(groups, version, 1.0)).permits)
    appends = [
        client.append(lambda sequence, permit=permit: frame_of(client.member, sequence, [permit], version))  # type: ignore[misc]
        for permit in permits
    ]
    await asyncio.gather(*appends)
    return [permit.group_id for permit in permits]


class FakeClock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class UnsyncedDisk(Disk):
    """A disk that says yes at once, for tests that are not about power loss."""

    def sync(self, fd: int) -> None:
        """Nothing."""

    def sync_folder(self, folder: Path) -> None:
        """Nothing."""
