"""The transport without sockets answers as gRPC does: the same scenarios through both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
import pytest

from forebay.buffer.calls import CLIENT_OPTIONS
from forebay.buffer.client import BufferClient, Fenced, Lease, Refused, Waiting
from forebay.buffer.in_process import in_process
from forebay.buffer.reservoir import open_reservoir
from forebay.buffer.server import serving
from forebay.config.models import RunFile
from forebay.loopback import free_addresses
from forebay.wire.v1 import common_pb2, control_pb2, experience_pb2, experience_pb2_grpc, weights_pb2_grpc
from forebay.wire.version import Version
from tests.buffer.support import (
    FakeClock,
    UnsyncedDisk,
    anchor,
    frame_of,
    join_learner,
    join_sampler,
    make_run,
    produce,
    weights,
)

V0 = Version(1, 0)
TRANSPORTS = ["grpc", "in process"]


@dataclass(kw_only=True)
class Place:
    """A buffer on either transport, which can be cut off."""

    run: RunFile
    client: Callable[[], BufferClient]
    channel: Callable[[], Any]
    cut_and_mend: Callable[[], AbstractAsyncContextManager[None]]


class Open(Protocol):
    def __call__(self, transport: str) -> AbstractAsyncContextManager[Place]: ...


@pytest.fixture
def place(tmp_path: Path) -> Open:
    @asynccontextmanager
    async def opened(transport: str) -> AsyncIterator[Place]:
        run = make_run(tmp_path / transport)
        async with over_grpc(run) if transport == "grpc" else without_sockets(run) as found:
            yield found

    return opened


def reservoir(run: RunFile) -> Any:
    return open_reservoir(run, clock=FakeClock(), disk=UnsyncedDisk())


@asynccontextmanager
async def over_grpc(run: RunFile) -> AsyncIterator[Place]:
    (address,) = free_addresses(1)
    served = serving(reservoir(run), listen=address, grace_s=0.0)
    await served.__aenter__()

    @asynccontextmanager
    async def cut_and_mend() -> AsyncIterator[None]:
        nonlocal served
        await served.__aexit__(None, None, None)
        yield
        served = serving(reservoir(run), listen=address, grace_s=0.0)
        await served.__aenter__()

    try:
        yield Place(
            run=run,
            client=lambda: BufferClient(address, on_trouble=lambda line: None),
            channel=lambda: grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS),
            cut_and_mend=cut_and_mend,
        )
    finally:
        await served.__aexit__(None, None, None)


@asynccontextmanager
async def without_sockets(run: RunFile) -> AsyncIterator[Place]:
    async with in_process(reservoir(run)) as buffer:

        @asynccontextmanager
        async def cut_and_mend() -> AsyncIterator[None]:
            buffer.cut()
            yield
            buffer.mend()

        yield Place(
            run=run,
            client=lambda: buffer.client(on_trouble=lambda line: None),
            channel=buffer.channel,
            cut_and_mend=cut_and_mend,
        )


async def scenario(place: Place) -> list[Any]:
    """What a learner and a sampler are answered, from joining to leaving."""
    seen: list[Any] = []
    async with place.client() as learner, place.client() as sampler, place.client() as successor:
        seen.append(await join_learner(learner, place.run))
        seen.append(await join_sampler(sampler, place.run))
        seen.append(Version.from_proto((await anext(sampler.watch())).version))
        plan = await sampler.plan(None, b"")
        seen.append([plan, [await sampler.fetch(manifest) for manifest in plan.path]])
        waiting = await learner.lease(1, 0.0)
        assert isinstance(waiting, Waiting)
        seen.append(waiting)
        seen.append(await produce(sampler, 3, V0))
        lease = await learner.lease(1, 5.0)
        assert isinstance(lease, Lease)
        assert lease.frames
        seen.append(lease)
        await learner.commit(1, 1, {"reward": 1.0})
        seen.append((await learner.history()).steps[0].metrics_json)
        seen.append(await told(learner.commit(9, 0, {})))
        await join_sampler(successor, place.run)
        seen.append(await told(sampler.admit(1, V0, 0.0)))
        seen.append(await told(sampler.append(lambda n: frame_of(sampler.member, n, [], V0))))
        await successor.leave("done")
        status = await learner.status()
        seen.append([(member.member.id, member.state) for member in status.members])
        seen.append(await learner.ledger())
    return seen


async def told(asking: Any) -> tuple[type[Exception], str]:
    """The error that comes of it."""
    with pytest.raises(Refused) as raised:
        await asking
    return raised.type, str(raised.value)


async def test_both_transports_give_the_same_answers(place: Open) -> None:
    answers = []
    for transport in TRANSPORTS:
        async with asyncio.timeout(30), place(transport) as opened:
            answers.append(await scenario(opened))
    assert answers[0] == answers[1]
    assert [answer[0] for answer in answers[0] if isinstance(answer, tuple)] == [Refused, Fenced, Fenced]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_cut_is_survived(place: Open, transport: str) -> None:
    """A lease that waits, an append and a watch go on when the buffer is back."""
    async with (
        asyncio.timeout(60),
        place(transport) as opened,
        opened.client() as learner,
        opened.client() as sampler,
    ):
        await join_learner(learner, opened.run)
        await join_sampler(sampler, opened.run)
        await produce(sampler, 1, V0)
        announcements = sampler.watch()
        await anext(announcements)
        newer = asyncio.ensure_future(anext(announcements))
        leasing = asyncio.create_task(learner.lease(1, 20.0))
        (permit,) = (await sampler.admit(1, V0, 0.0)).permits
        async with opened.cut_and_mend():
            appending = asyncio.create_task(sampler.append(lambda n: frame_of(sampler.member, n, [permit], V0)))
            assert await raw_codes(opened) == [grpc.StatusCode.UNAVAILABLE] * 2
            assert not appending.done()
        await appending
        lease = await leasing
        while not isinstance(lease, Lease):  # a buffer that stops in order answers first
            lease = await learner.lease(1, 5.0)
        assert permit.group_id in lease.group_ids
        await learner.publish(anchor(Version(1, 1), seed=1))
        assert Version.from_proto((await newer).version) == Version(1, 1)


async def raw_codes(opened: Place) -> list[grpc.StatusCode]:
    """How calls without any patience end: one question, and a stream's first word."""
    channel = opened.channel()
    stub: Any = experience_pb2_grpc.ExperienceStub(channel)  # type: ignore[no-untyped-call]
    codes = []
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Ledger(experience_pb2.LedgerRequest())
    codes.append(raised.value.code())
    stream = stub.Append()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stream.write(experience_pb2.AppendRequest())
    codes.append(raised.value.code())
    await channel.close(None)
    return codes


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_errors_and_deadlines_of_bare_calls(place: Open, transport: str) -> None:
    async with asyncio.timeout(30), place(transport) as opened:
        channel = opened.channel()
        experience: Any = experience_pb2_grpc.ExperienceStub(channel)  # type: ignore[no-untyped-call]
        weight_stub: Any = weights_pb2_grpc.WeightsStub(channel)  # type: ignore[no-untyped-call]
        stranger = common_pb2.Member(role=common_pb2.ROLE_SAMPLER, id="x", incarnation=1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await experience.Admit(experience_pb2.AdmitRequest(member=stranger))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert raised.value.details().startswith("x never joined this buffer")
        assert dict(raised.value.trailing_metadata()) == {"forebay-error": "unknown-member"}
        async with opened.client() as client:
            await join_learner(client, opened.run)
            request = experience_pb2.LeaseRequest(member=client.member, step=1, wait_s=30.0)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in experience.Lease(request, timeout=0.05):
                    pass
            assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await experience.Commit(
                    experience_pb2.CommitRequest(member=client.member, step=1, metrics_json="x" * (9 << 20))
                )
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watching = weight_stub.Watch(control_pb2.StatusRequest())
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching.read()
        await channel.close(None)


async def test_neither_side_holds_the_others_objects(place: Open) -> None:
    async with place("in process") as opened, opened.client() as learner, opened.client() as sampler:
        await join_learner(learner, opened.run)
        await join_sampler(sampler, opened.run)
        (permit,) = (await sampler.admit(1, V0, 0.0)).permits
        frame = frame_of(sampler.member, 0, [permit], V0)
        await sampler.append(lambda sequence: frame)
        frame.header.groups[0].generated_tokens = 999
        rows = (await learner.ledger()).rows
        assert {row.tokens for row in rows} == {10}
        first = (await sampler.plan(None, b"")).path[0]
        first.payload_bytes = 1
        assert (await sampler.plan(None, b"")).path[0].payload_bytes > weights(0).nbytes // 2


async def test_a_call_that_nobody_holds_is_ended(place: Open) -> None:
    async with place("in process") as opened, opened.client() as learner:
        await join_learner(learner, opened.run)
        channel = opened.channel()
        stub: Any = experience_pb2_grpc.ExperienceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Lease(experience_pb2.LeaseRequest(member=learner.member, step=1, wait_s=30.0))
        exchange = call._exchange
        del call
        await asyncio.wait([exchange.task], timeout=5)
        assert exchange.task.cancelled()
        assert exchange not in channel._buffer._running
