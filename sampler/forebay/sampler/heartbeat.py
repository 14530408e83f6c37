"""Tells the buffer what this sampler does, and takes its orders."""

from __future__ import annotations

import asyncio
import logging

from forebay.buffer.client import BufferClient
from forebay.sampler.activity import Activity
from forebay.sampler.orders import Orders
from forebay.sampler.receiver import WeightReceiver

log = logging.getLogger("forebay.sampler.heartbeat")


async def beat(
    client: BufferClient, every_s: float, activity: Activity, receiver: WeightReceiver, orders: Orders
) -> None:
    """Beat for ever; an unreachable buffer is waited for. Raises Fenced when another process took this id."""
    loop = asyncio.get_running_loop()
    while True:
        started = loop.time()
        held = receiver.held
        answer = await client.heartbeat(
            activity.doing,
            activity.since_s,
            held.version if held else None,
            held.digest if held else b"",
            activity.take_gauges(),
        )
        if answer.finished:
            orders.finish()
        if answer.drain:
            orders.drain("the run is draining")
        await asyncio.sleep(max(0.0, every_s - (loop.time() - started)))
