"""A learner that does not read what it leased: the buffer holds a bounded part of it, and serves everybody else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from forebay.buffer.client import BufferClient
from forebay.config.models import RunFile
from forebay.wire.v1 import experience_pb2, experience_pb2_grpc
from forebay.wire.version import Version
from tests.buffer.support import join_learner, join_sampler, produce
from tests.buffer.test_service import listening_run, started
from tests.faults.test_network import appending

V0 = Version(1, 0)
FRAMES, FRAME_BYTES = 120, 1 << 20
#: What gRPC and one piece that is read ahead may hold; the batch is 120 MiB.
BOUND_BYTES = 40 << 20


def resident_bytes(pid: int) -> int:
    """Of a process, now."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) << 10


async def fill(run: RunFile) -> None:
    """The batch of step 1, through a client that then goes: what it had on the way is not to be counted."""
    async with BufferClient(run.buffer.listen, on_trouble=lambda line: None) as sampler:
        await join_sampler(sampler, run)
        permits = list((await sampler.admit(FRAMES, V0, 1.0)).permits)
        await asyncio.gather(*appending(sampler, permits, FRAME_BYTES))


def begun_lease(learner: BufferClient) -> Any:
    """A lease whose answers are read one by one, or not."""
    stub: Any = experience_pb2_grpc.ExperienceStub(learner._link.channel)  # type: ignore[no-untyped-call]
    return stub.Lease(experience_pb2.LeaseRequest(member=learner.member, step=1, wait_s=5.0))


async def test_a_slow_reader_of_a_lease(tmp_path: Path) -> None:
    """Row 27: while it reads nothing the buffer's memory is bounded and appends go on; then it gets everything."""
    run = listening_run(tmp_path, groups_per_step=FRAMES, max_staleness=3)
    quick = BufferClient(run.buffer.listen, on_trouble=lambda line: None)
    with started(run) as process:
        async with BufferClient(run.buffer.listen, on_trouble=lambda line: None) as learner, quick as sampler:
            await join_learner(learner, run)
            await fill(run)
            await join_sampler(sampler, run, "quick")
            await produce(sampler, 20, V0)
            before_bytes = resident_bytes(process.pid)
            parts = aiter(begun_lease(learner))
            first = await anext(parts)
            held_bytes = 0
            for _ in range(100):
                assert len(await asyncio.wait_for(produce(sampler, 1, V0), 2.0)) == 1
                held_bytes = max(held_bytes, resident_bytes(process.pid) - before_bytes)
            assert held_bytes < BOUND_BYTES
            frames = [frame for part in [answer async for answer in parts] for frame in part.frames]
            assert first.batch.frames == len(frames) == FRAMES
            assert sum(len(frame.payload) for frame in frames) > FRAMES * FRAME_BYTES
