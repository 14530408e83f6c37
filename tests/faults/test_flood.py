"""A run that floods its buffer beyond its quota, without ever waiting as it is told: another run does not feel it."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.buffer.client import BufferClient
from forebay.buffer.intake import FULL_RETRY_S
from forebay.config.models import RunFile
from forebay.loopback import free_addresses
from forebay.wire.version import Version
from tests.buffer.support import join_learner, join_sampler, make_run, produce

V0 = Version(1, 0)
APPENDS = 150
_BUFFER = """
import sys
from forebay.buffer.service import serve
from forebay.config.models import RunFile
sys.exit(serve(*map(RunFile.model_validate_json, sys.argv[1:])))
"""
#: Fills its run's quota; then sends the same large frame again as soon as it is pushed back. Prints why, each time.
_FLOOD = """
import asyncio, sys
from forebay.buffer.client import BufferClient
from forebay.config.models import RunFile
from forebay.wire.v1 import experience_pb2, experience_pb2_grpc
from forebay.wire.version import Version
from tests.buffer.support import frame_of, join_sampler, produce

async def flood(run):
    async with BufferClient(run.buffer.listen) as client:
        await join_sampler(client, run)
        await produce(client, 2, Version(1, 0))
        [permit] = (await client.admit(1, Version(1, 0), 5.0)).permits
        frame = frame_of(client.member, 2, [permit], Version(1, 0), 1 << 20)
        call = experience_pb2_grpc.ExperienceStub(client._link.channel).Append()
        await call.write(experience_pb2.AppendRequest(member=client.member))
        for number in range(10**9):
            await call.write(experience_pb2.AppendRequest(frames=[frame]))
            answer = await call.read()
            assert answer.outcome == experience_pb2.AppendResponse.FULL, answer
            print(number, answer.detail, flush=True)

asyncio.run(flood(RunFile.model_validate_json(sys.argv[1])))
"""


def runs_of(folder: Path) -> list[RunFile]:
    """Run a with a small quota, and run b, at one address."""
    buffer = dict(zip(("listen", "http"), free_addresses(2), strict=True))
    limits = {"a": {"max_trajectories": 4}, "b": {}}
    return [
        make_run(folder / name, name=name, buffer=buffer | limits[name], steps=900, max_staleness=900)
        for name in ("a", "b")
    ]


@contextmanager
def running(program: str, *runs: RunFile) -> Iterator[subprocess.Popen[str]]:
    """The program with these runs; killed in the end."""
    words = [sys.executable, "-c", program, *(run.model_dump_json() for run in runs)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def latencies_ms(sampler: BufferClient) -> list[float]:
    """Of appends, one after the other; sorted."""
    found = list[float]()
    for _ in range(APPENDS):
        began = time.monotonic()
        assert len(await produce(sampler, 1, V0)) == 1
        found.append((time.monotonic() - began) * 1e3)
    return sorted(found)


async def test_another_run_floods(tmp_path: Path) -> None:
    """Row 43: it is refused by its own limit's name, and the other run's appends take what they took."""
    a, b = runs_of(tmp_path)
    with running(_BUFFER, a, b):
        async with (
            BufferClient(a.buffer.listen, on_trouble=lambda line: None) as flooded,
            BufferClient(b.buffer.listen, on_trouble=lambda line: None) as learner,
            BufferClient(b.buffer.listen, on_trouble=lambda line: None) as sampler,
        ):
            await join_learner(flooded, a)
            await join_learner(learner, b)
            await join_sampler(sampler, b)
            await latencies_ms(sampler)
            quiet = await latencies_ms(sampler)
            with running(_FLOOD, a) as flood:
                assert flood.stdout is not None
                assert "max_trajectories = 4 is reached" in await asyncio.to_thread(flood.stdout.readline)
                began = time.monotonic()
                loud = await latencies_ms(sampler)
                took_s = time.monotonic() - began
                assert flood.poll() is None
                flood.kill()
                answers = len(flood.stdout.read().splitlines())
            assert answers <= took_s / FULL_RETRY_S + 2, "it was answered sooner than it was told to come back"
            assert statistics.median(loud) < 2 * statistics.median(quiet)
