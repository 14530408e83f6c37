"""A process of samplers that only append: `python -m benchmarks.buffer_load.sampler RUNFILE`, told over standard input.

Commands: `join` with the members' names, `admit` permits for each, `append` frames from each.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.buffer_load.commands import obey
from benchmarks.buffer_load.frames import FLEET, REGION, FrameMaker, FrameShape
from forebay.buffer.client import BufferClient
from forebay.config.identity import run_json
from forebay.config.load import load
from forebay.config.models import RunFile
from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version

_PERMITS_A_CALL = 8192
#: The learner's load process publishes it before samplers ask for permits.
VERSION = Version(1, 0)


class Sampler:
    """One member with a stream of its own."""

    def __init__(self, run: RunFile, name: str) -> None:
        self._run, self._name = run, name
        self._client = BufferClient(run.buffer.listen, on_trouble=lambda line: None)
        self._permits: deque[experience_pb2.Permit] = deque()

    async def join(self) -> None:
        """Become a member."""
        await self._client.join("sampler", self._name, FLEET, REGION, run_json(self._run))

    async def admit(self, groups: int) -> None:
        """Get that many more permits."""
        wanted = len(self._permits) + groups
        while len(self._permits) < wanted:
            ask = min(_PERMITS_A_CALL, wanted - len(self._permits))
            answer = await self._client.admit(ask, VERSION, 10.0)
            if not answer.permits:
                raise RuntimeError(f"no permits: waiting for {answer.waiting_for}")
            self._permits.extend(answer.permits)

    async def append(self, shape: FrameShape, frames: int, in_flight: int, frames_s: float) -> list[float]:
        """Append `frames` frames, `in_flight` at a time, at most `frames_s` a second unless 0; seconds of each."""
        maker = FrameMaker(shape, self._client.member, VERSION, seed=0)
        due = iter(_schedule(frames, frames_s))
        latencies: list[float] = []
        await asyncio.gather(*(self._append_in_turn(shape, maker, due, latencies) for _ in range(in_flight)))
        return latencies

    async def _append_in_turn(
        self, shape: FrameShape, maker: FrameMaker, due: Iterator[float], latencies: list[float]
    ) -> None:
        for start in due:
            await asyncio.sleep(max(0.0, start - time.monotonic()))
            permits = [self._permits.popleft() for _ in range(shape.groups_a_frame)]
            began = max(start, 0.0) or time.monotonic()
            await self._client.append(partial(maker.make, permits))
            latencies.append(time.monotonic() - began)


def _schedule(frames: int, frames_s: float) -> Iterator[float]:
    """When each frame is due, on the monotonic clock; 0: at once."""
    now = time.monotonic()
    return ((now + number / frames_s if frames_s else 0.0) for number in range(frames))


class SamplerLoad:
    """The commands."""

    def __init__(self, run: RunFile) -> None:
        self._run = run
        self._samplers: list[Sampler] = []

    async def join(self, names: Sequence[str]) -> dict[str, Any]:
        """Have a member of each name."""
        self._samplers = [Sampler(self._run, name) for name in names]
        await asyncio.gather(*(sampler.join() for sampler in self._samplers))
        return {"members": len(self._samplers)}

    async def admit(self, groups: int) -> dict[str, Any]:
        """Permits for `groups` groups to each member."""
        began = time.monotonic()
        await asyncio.gather(*(sampler.admit(groups) for sampler in self._samplers))
        return {"seconds": time.monotonic() - began}

    async def append(
        self, frames: int, groups_a_frame: int, row_bytes: int, in_flight: int, frames_s: float = 0.0
    ) -> dict[str, Any]:
        """Append `frames` frames from each member; rows and bytes that were acknowledged, and when."""
        size = self._run.learner.group_size
        shape = FrameShape(row_bytes=row_bytes, group_size=size, groups_a_frame=groups_a_frame)
        began = time.monotonic()
        found = await asyncio.gather(
            *(sampler.append(shape, frames, in_flight, frames_s) for sampler in self._samplers)
        )
        latencies = [round(1e3 * seconds, 3) for some in found for seconds in some]
        return {
            "began_s": began,
            "ended_s": time.monotonic(),
            "rows": len(latencies) * shape.rows,
            "bytes": len(latencies) * shape.payload_bytes,
            "latencies_ms": latencies,
        }


async def main(argv: Sequence[str]) -> None:
    """Obey until standard input ends."""
    samplers = SamplerLoad(load([Path(argv[0])], {}))
    await obey({"join": samplers.join, "admit": samplers.admit, "append": samplers.append})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
