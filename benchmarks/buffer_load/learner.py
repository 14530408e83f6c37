"""A learner that trains nothing: `python -m benchmarks.buffer_load.learner RUNFILE`, told over standard input.

Commands: `start` (join and publish tiny weights), `train` steps: a lease commits the step before; check what arrived.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.buffer_load.commands import obey
from forebay.buffer.client import BufferClient, Lease, Trained
from forebay.config.identity import run_json
from forebay.config.load import load
from forebay.config.models import RunFile
from forebay.wire.frame_header import checksum
from forebay.wire.version import Version
from forebay.wire.weights import Encoded, HostState, TensorSpec, encode_anchor


class LearnerLoad:
    """The commands."""

    def __init__(self, run: RunFile) -> None:
        self._run = run
        self._client = BufferClient(run.buffer.listen)
        self._step = 0

    async def start(self) -> dict[str, Any]:
        """Join as a new run's learner and publish its first weights."""
        joined = await self._client.join("learner", "learner", "", "", run_json(self._run))
        await self._client.rewind(joined.checkpoint_step)
        self._step = joined.checkpoint_step
        await self._client.publish(_weights(Version(joined.member.incarnation, self._step)))
        return {"step": self._step}

    async def train(self, steps: int) -> dict[str, Any]:
        """Lease and commit that many steps; rows and bytes that arrived, and when; seconds of each cycle in ms."""
        began, rows, received, latencies = time.monotonic(), 0, 0, list[float]()
        trained: Trained | None = None
        for _ in range(steps):
            start = time.monotonic()
            arrived = arrived_in(await self._lease(trained))
            rows, received = rows + arrived[0], received + arrived[1]
            trained = self._trained()
            latencies.append(round(1e3 * (time.monotonic() - start), 3))
        if trained is not None:
            await self._client.commit(trained.step, trained.checkpoint_step, trained.metrics)
        ended = time.monotonic()
        return {"began_s": began, "ended_s": ended, "rows": rows, "bytes": received, "latencies_ms": latencies}

    async def _lease(self, trained: Trained | None) -> Lease:
        lease = await self._client.lease(self._step + 1, 30.0, trained)
        if not isinstance(lease, Lease):
            raise RuntimeError(f"no batch for step {self._step + 1}: {lease.cause}")
        return lease

    def _trained(self) -> Trained:
        self._step += 1
        checkpoint = self._step if self._step % self._run.learner.checkpoint_every_steps == 0 else 0
        return Trained(step=self._step, checkpoint_step=checkpoint, metrics={"loss": 0.5, "reward": 0.5})


def arrived_in(lease: Lease) -> tuple[int, int]:
    """Rows and payload bytes of a lease, each frame held against its checksum. Raises ValueError."""
    wanted, rows, received = set(lease.group_ids), 0, 0
    for frame in lease.frames:
        payload = frame.payload  # a copy each time
        if checksum(payload) != frame.header.payload_xxh3:
            raise ValueError(f"frame {frame.header.sequence} of {frame.header.sampler} arrived damaged")
        received += len(payload)
        for group in frame.header.groups:
            if group.group_id in wanted:
                wanted.remove(group.group_id)
                rows += group.members
    if wanted:
        raise ValueError(f"step {lease.step}: {len(wanted)} of {len(lease.group_ids)} groups did not arrive")
    return rows, received


def _weights(version: Version) -> Encoded:
    state = HostState.allocate([TensorSpec(name="w", dtype="BF16", shape=(1000,))])
    state.bits_of("w")[:] = np.arange(1000, dtype=np.uint16) + 0x3000
    return encode_anchor(state, version=version)


async def main(argv: Sequence[str]) -> None:
    """Obey until standard input ends."""
    learner = LearnerLoad(load([Path(argv[0])], {}))
    await obey({"start": learner.start, "train": learner.train})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
