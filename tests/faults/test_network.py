"""Lines that break, stall, lose answers or are long: clients wait within bounds, and everything arrives once."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import grpc.aio
import pytest

from forebay.buffer.calls import CLIENT_OPTIONS
from forebay.buffer.client import BufferClient, Fenced, Lease
from forebay.buffer.conservation import imbalances
from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version
from tests.buffer.conftest import Serve, Served
from tests.buffer.support import frame_of, join_learner, join_sampler, produce
from tests.buffer.test_experience import raw_append
from tests.faults.history import journalled
from tests.faults.proxy import Proxy, proxied

V0 = Version(1, 0)
Response = experience_pb2.AppendResponse


def impatient(proxy: Proxy, keepalive_ms: int) -> BufferClient:
    """A client that looks more often than usual whether the buffer is still there."""
    shortened = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    fast = {name: keepalive_ms for name in shortened if name in dict(CLIENT_OPTIONS)}
    channel = grpc.aio.insecure_channel(proxy.address, options=list((dict(CLIENT_OPTIONS) | fast).items()))
    return BufferClient(proxy.address, channel=channel, on_trouble=lambda line: None)


def client_of(proxy: Proxy, **options: Any) -> BufferClient:
    return BufferClient(proxy.address, on_trouble=lambda line: None, **options)


async def until(condition: Any) -> None:
    """Sockets give no notice: look often."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def appending(client: BufferClient, permits: list[experience_pb2.Permit], filler: int = 0) -> list[asyncio.Task[None]]:
    """One frame for each permit."""
    build = partial(frame_of, client.member, version=V0, filler=filler)
    return [
        asyncio.create_task(client.append(lambda sequence, permit=permit: build(sequence, [permit])))  # type: ignore[misc]
        for permit in permits
    ]


def arrived_once(served: Served, frames: int) -> None:
    """Every frame of the only sampler is in the journal, once and in order."""
    served.reservoir.journal.flush()
    found = journalled([served.reservoir.journal.folder])
    assert [key for key, _ in found.frames] == [("s0", 1, number) for number in range(frames)]
    assert len(found.taken) == len(set(found.taken))


async def test_a_frame_sent_a_hundred_times(serve: Serve) -> None:
    """Rows 17, 19: one row and a hundred duplicates; a gap is told what is expected."""
    async with serve() as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        member = await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(2, V0, 0.0)).permits)
        frame = frame_of(member, 0, permits[:1], V0)
        late = frame_of(member, 7, permits[1:], V0)
        answers = await raw_append(sampler, *[frame] * 101, late)
        outcomes = [answer.outcome for answer in answers]
        assert outcomes == [Response.STORED, *[Response.DUPLICATE] * 100, Response.OUT_OF_SEQUENCE]
        assert answers[-1].expected_sequence == 1
        arrived_once(served, 1)


async def test_zombies_are_fenced(serve: Serve) -> None:
    """Row 20: whatever an old incarnation still says is refused, and changes nothing."""
    async with serve() as served, served.client() as old, served.client() as new, served.client() as sampler:
        await join_learner(old, served.run)
        await join_sampler(sampler, served.run)
        await produce(sampler, 4, V0)
        assert isinstance(await old.lease(1, 5.0), Lease)
        await join_learner(new, served.run)
        before = served.reservoir.journal.last_lsn
        for call in (old.lease(1, 0.0), old.commit(1, 1, {}), old.rewind(0)):
            with pytest.raises(Fenced):
                await call
        assert served.reservoir.journal.last_lsn == before
        assert served.reservoir.state.committed == 0


async def test_a_partition(serve: Serve) -> None:
    """Row 23: the outbox fills to its bound, then appends wait; after the line is mended nothing is lost or doubled."""
    async with (
        serve(steps=40, max_staleness=40) as served,
        served.client() as learner,
        proxied(served.server.port) as proxy,
        client_of(proxy, max_outbox_bytes=5000) as sampler,
    ):
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(60, V0, 0.0)).permits)
        await asyncio.gather(*appending(sampler, permits[:5]))
        proxy.cut()
        waiting = appending(sampler, permits[5:], 400)
        outbox: Any = sampler._outbox
        await until(lambda: outbox._bytes >= 5000)
        await until(lambda: proxy.line.connections >= 3)
        assert outbox._bytes < 5000 + 600
        assert not any(task.done() for task in waiting)
        proxy.mend()
        await asyncio.gather(*waiting)
        arrived_once(served, 60)


@pytest.mark.parametrize("keepalive_ms", [300])
async def test_answers_are_lost(serve: Serve, keepalive_ms: int) -> None:
    """Rows 22, 24, 30: requests arrive, answers do not; keepalive notices, and what is said again counts once."""
    async with (
        serve(steps=40, max_staleness=40) as served,
        proxied(served.server.port) as proxy,
        impatient(proxy, keepalive_ms) as learner,
        impatient(proxy, keepalive_ms) as sampler,
    ):
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(20, V0, 0.0)).permits)
        await asyncio.gather(*appending(sampler, permits[:4]))
        assert isinstance(await learner.lease(1, 5.0), Lease)
        proxy.stall(up=False)
        appends = appending(sampler, permits[4:])
        committing = asyncio.create_task(learner.commit(1, 1, {}))
        await until(lambda: len(served.reservoir.state.groups) == 20 and served.reservoir.state.committed == 1)
        assert not committing.done()
        connections = proxy.line.connections
        await until(lambda: proxy.line.connections > connections)
        proxy.mend()
        await asyncio.gather(committing, *appends)
        arrived_once(served, 20)
        assert served.reservoir.state.committed == 1
        assert imbalances(await learner.ledger()) == []


def test_a_half_open_line_is_noticed_within_30_s() -> None:
    """Row 22: what the product's options add up to; the next tests see the mechanism at work with shorter ones."""
    options = dict(CLIENT_OPTIONS)
    probe_s = options["grpc.http2.ping_timeout_ms"] / 1000
    assert probe_s < 30
    assert (options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"]) / 1000 < 30


async def test_a_half_open_line(serve: Serve) -> None:
    """Row 22: nothing passes and nobody says so: keepalive finds out, and the stream goes on over a new connection."""
    async with (
        serve(steps=40, max_staleness=40) as served,
        served.client() as learner,
        proxied(served.server.port) as proxy,
        impatient(proxy, 300) as sampler,
    ):
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(20, V0, 0.0)).permits)
        await asyncio.gather(*appending(sampler, permits[:4]))
        proxy.stall()
        appends = appending(sampler, permits[4:])
        connections, began = proxy.line.connections, time.monotonic()
        await until(lambda: proxy.line.connections > connections)
        assert time.monotonic() - began < 5
        proxy.mend()
        await asyncio.gather(*appends)
        arrived_once(served, 20)


async def test_pings_every_second_cause_no_storm(serve: Serve) -> None:
    """Row 26: a client that pings far too often is told off a few times at most, and loses nothing."""
    async with (
        serve(steps=40, max_staleness=40) as served,
        served.client() as learner,
        proxied(served.server.port) as proxy,
        impatient(proxy, 100) as sampler,
    ):
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(80, V0, 0.0)).permits)[:20]
        for permit in permits:
            await asyncio.gather(*appending(sampler, [permit]))
            await sampler.admit(1, V0, 0.1)  # a long poll, in which only pings travel
        arrived_once(served, 20)
        assert proxy.line.connections <= 6
