"""A buffer that goes away and comes back: clients wait, go on, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from forebay.buffer.client import BlockingClient, BufferClient, ExperienceLost, Lease
from forebay.buffer.outbox import Outbox
from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version
from tests.buffer.conftest import Serve
from tests.buffer.support import anchor, frame_of, join_learner, join_sampler
from tests.end_to_end.shells import free_ports

V0 = Version(1, 0)


async def test_clients_go_on_over_a_restart(serve: Serve) -> None:
    port = free_ports(1)[0]
    said: list[str] = []
    async with (
        BufferClient(f"127.0.0.1:{port}", on_trouble=said.append) as learner,
        BufferClient(f"127.0.0.1:{port}", on_trouble=said.append) as sampler,
    ):
        async with serve(port=port) as served:
            await join_learner(learner, served.run)
            await join_sampler(sampler, served.run)
            permits = list((await sampler.admit(4, V0, 0.0)).permits)
            announcements = sampler.watch()
            await anext(announcements)
            newer = asyncio.ensure_future(anext(announcements))
            await sampler.append(lambda sequence: frame_of(sampler.member, sequence, permits[:1], V0))
        appending = asyncio.create_task(
            sampler.append(lambda sequence: frame_of(sampler.member, sequence, permits[1:], V0))
        )
        leasing = asyncio.create_task(learner.lease(1, 5.0))
        async with serve(port=port) as served:
            await appending
            lease = await leasing
            assert isinstance(lease, Lease)
            assert len(lease.group_ids) == 2
            assert served.reservoir.state.next_group == 4
            await learner.publish(anchor(Version(1, 1), seed=1))
            assert Version.from_proto((await newer).version) == Version(1, 1)


async def test_trouble_is_named_at_growing_intervals(serve: Serve) -> None:
    port = free_ports(1)[0]
    said: list[str] = []
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 2.0
        return now

    client = BufferClient(f"127.0.0.1:{port}", clock=clock, on_trouble=said.append)
    asking = asyncio.create_task(client.status())
    while len(said) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert said[0].startswith(f"buffer at 127.0.0.1:{port} unreachable, trying again (2 s): unavailable")
    assert "(6 s)" in said[1] or "(4 s)" in said[1]
    async with serve(port=port):
        assert (await asking).run == "test"
    assert "is back" in said[-1]
    await client.close()


async def test_a_buffer_that_forgot_frames_is_found_out(serve: Serve) -> None:
    async with serve() as served, served.client() as client:
        await join_sampler(client, served.run)
        outbox = client._outbox
        assert isinstance(outbox, Outbox)
        outbox._next = 3
        with pytest.raises(ExperienceLost, match="expects frame 0, but had acknowledged all before 3"):
            await client.append(lambda sequence: frame_of(client.member, sequence, [experience_pb2.Permit()], V0))


async def test_the_outbox_is_bounded(serve: Serve) -> None:
    async with serve() as served, served.client() as learner, served.client(max_outbox_bytes=50) as sampler:
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(4, V0, 0.0)).permits)
        held: list[int] = []

        def build(permit: experience_pb2.Permit, sequence: int) -> experience_pb2.Frame:
            assert sampler._outbox is not None
            held.append(len(sampler._outbox._entries))
            return frame_of(sampler.member, sequence, [permit], V0)

        await asyncio.gather(*(sampler.append(partial(build, permit)) for permit in permits))
        assert held == [0, 0, 0, 0]


async def test_the_blocking_client(serve: Serve) -> None:
    async with serve() as served:
        run_json = served.reservoir.state.run_json

        def work() -> str:
            with BlockingClient(served.address) as client:
                client.join("learner", "l", "", "", run_json)
                client.rewind(0)
                client.publish(anchor(V0))
                assert Version.from_proto(next(client.watch()).version) == V0
                client.heartbeat("training", 0.0, V0, b"", {"x": 1.0})
                client.leave("done")
                return client.status().members[0].state

        assert await asyncio.to_thread(work) == "left"
