"""The append stream: one answer for many frames, no sooner than they are as safe as was asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from forebay.buffer.append_stream import MAX_CREDIT_BYTES, MIN_CREDIT_BYTES
from forebay.buffer.client import BufferClient
from forebay.buffer.disk import Disk
from forebay.buffer.intake import Received
from forebay.wire.experience import MAX_FRAME_BYTES
from forebay.wire.v1 import common_pb2, experience_pb2, experience_pb2_grpc
from forebay.wire.version import Version
from tests.buffer.conftest import Serve
from tests.buffer.support import UnsyncedDisk, frame_of, join_learner, join_sampler

V0 = Version(1, 0)
Response = experience_pb2.AppendResponse


async def stream_of(client: BufferClient, level: int = 0) -> Any:
    stub: Any = experience_pb2_grpc.ExperienceStub(client._link.channel)  # type: ignore[no-untyped-call]
    call = stub.Append()
    await call.write(experience_pb2.AppendRequest(member=client.member, level=level))  # type: ignore[arg-type]
    return call


async def until(condition: Callable[[], bool]) -> None:
    """The server is on the same loop: let it work."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class GatedDisk(UnsyncedDisk):
    """Writes and syncs wait until they are let through."""

    def __init__(self) -> None:
        self.writes, self.syncs = threading.Event(), threading.Event()
        self.writes.set()
        self.syncs.set()

    def write(self, fd: int, parts: Any, offset: int) -> int:
        self.writes.wait(30)
        return Disk.write(self, fd, parts, offset)

    def sync(self, fd: int) -> None:
        self.syncs.wait(30)


async def test_frames_that_became_safe_together_get_one_answer(serve: Serve) -> None:
    disk = GatedDisk()
    settings: dict[str, Any] = {"max_staleness": 9}
    async with serve(disk=disk, **settings) as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        member = await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(8, V0, 0.0)).permits)
        call = await stream_of(sampler)
        frames = [frame_of(member, sequence, [permit], V0) for sequence, permit in enumerate(permits)]
        disk.writes.clear()
        await call.write(experience_pb2.AppendRequest(frames=frames))
        await until(lambda: len(served.reservoir.state.buffered) == 8)
        disk.writes.set()
        answers = [await call.read()]
        while answers[-1].sequence < 7:
            answers.append(await call.read())
        assert len(answers) <= 2, "what the writer had in hand, and all that gathered meanwhile"
        assert {(answer.outcome, answer.level) for answer in answers} == {(Response.STORED, experience_pb2.DURABLE)}
        assert answers[-1].lsn == served.reservoir.journal.durable_lsn
        call.cancel()


async def test_an_answer_never_stands_for_a_refused_frame(serve: Serve) -> None:
    async with serve(max_staleness=9) as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        member = await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(3, V0, 0.0)).permits)
        frames = [frame_of(member, sequence, [permit], V0) for sequence, permit in enumerate(permits)]
        frames[1].payload = b"?" * len(frames[1].payload)
        call = await stream_of(sampler)
        await call.write(experience_pb2.AppendRequest(frames=frames))
        answers = [await call.read() for _ in range(3)]
        outcomes = [Response.STORED, Response.REFUSED, Response.STORED]
        assert [(answer.outcome, answer.sequence) for answer in answers] == list(zip(outcomes, range(3), strict=True))
        call.cancel()


def test_a_frame_is_too_large_with_its_header_too() -> None:
    """A payload just below the cap, and a header that takes the whole frame above it."""
    member = common_pb2.Member(id="s0", incarnation=1, run="test")
    permits = [experience_pb2.Permit(group_id=number, attempt=1) for number in range(1000)]
    frame = frame_of(member, 1, permits, V0, filler=MAX_FRAME_BYTES - 1000)
    assert len(frame.payload) < MAX_FRAME_BYTES < frame.ByteSize()
    assert "at most" in Received.of(frame).damage
    assert Received.of(frame_of(member, 1, permits, V0)).damage == ""


@pytest.mark.parametrize(
    ("ack", "gates"),
    [("memory", []), ("written", ["writes"]), ("durable", ["writes", "syncs"])],
)
async def test_append_returns_once_the_frame_is_as_safe_as_asked(serve: Serve, ack: str, gates: list[str]) -> None:
    disk = GatedDisk()
    async with serve(disk=disk) as served, served.client() as learner, served.client(ack=ack) as sampler:
        await join_learner(learner, served.run)
        member = await join_sampler(sampler, served.run)
        (permit,) = (await sampler.admit(1, V0, 0.0)).permits
        disk.writes.clear()
        disk.syncs.clear()
        try:
            appending = asyncio.create_task(sampler.append(lambda sequence: frame_of(member, sequence, [permit], V0)))
            for gate in gates:
                done, _ = await asyncio.wait([appending], timeout=0.2)
                assert not done, f"acknowledged before the disk's {gate}"
                getattr(disk, gate).set()
            await asyncio.wait_for(appending, 10.0)
        finally:
            disk.writes.set()
            disk.syncs.set()


async def test_streams_share_the_memory_as_credit(serve: Serve) -> None:
    async with serve(buffer={"memory_mb": 20}) as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        member = await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(2, V0, 0.0)).permits)
        call = await stream_of(sampler)
        await call.write(experience_pb2.AppendRequest(frames=[frame_of(member, 0, permits[:1], V0)]))
        assert (await call.read()).credit_bytes == MAX_CREDIT_BYTES
        others = [await stream_of(learner) for _ in range(9)]
        await until(lambda: served.reservoir.streams == 10)
        await call.write(experience_pb2.AppendRequest(frames=[frame_of(member, 1, permits[1:], V0)]))
        credit = (await call.read()).credit_bytes
        assert MIN_CREDIT_BYTES <= credit <= (20 << 20) // 10
        for each in (call, *others):
            each.cancel()
