"""A line with 300 ms from a question to its answer: what is on the way is bounded by the window, not by the waiting."""

from __future__ import annotations

import asyncio
import time

from forebay.buffer.client import BufferClient
from forebay.buffer.outbox import WINDOW_FRAMES
from forebay.wire.version import Version
from tests.buffer.conftest import Serve
from tests.buffer.support import join_learner, join_sampler
from tests.faults.proxy import proxied
from tests.faults.test_network import appending, arrived_once, client_of

V0 = Version(1, 0)
ROUND_TRIP_S = 0.3
WINDOWS = 4


async def seconds_for(sampler: BufferClient, windows: int) -> float:
    """Until so many windows of frames, handed over at once, are acknowledged; the permits are there before."""
    permits = list((await sampler.admit(windows * WINDOW_FRAMES, V0, 5.0)).permits)
    assert len(permits) == windows * WINDOW_FRAMES
    began = time.monotonic()
    await asyncio.gather(*appending(sampler, permits))
    return time.monotonic() - began


async def test_round_trips_of_300_ms(serve: Serve) -> None:
    """Row 25: 80 % of what the window (512 frames a round trip) and this machine's own time allow; one connection."""
    async with (
        serve(steps=5000, max_staleness=4900) as served,
        served.client() as learner,
        proxied(served.server.port) as proxy,
        client_of(proxy) as sampler,
    ):
        await join_learner(learner, served.run)
        proxy.line.delay_s = ROUND_TRIP_S / 2
        await join_sampler(sampler, served.run)
        await seconds_for(sampler, 1)  # gRPC finds out how much the line holds
        far_s = min([await seconds_for(sampler, WINDOWS) for _ in range(2)])
        assert proxy.line.connections == 1
        proxy.line.delay_s = 0.0
        near_s = min([await seconds_for(sampler, WINDOWS) for _ in range(2)])
        assert far_s < (WINDOWS * ROUND_TRIP_S + near_s) / 0.8
        arrived_once(served, (1 + 4 * WINDOWS) * WINDOW_FRAMES)
