"""Disks that refuse, fail or stall: nothing unsafe is acknowledged, nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import shutil
import subprocess
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.buffer.client import BufferClient, Lease, Refused
from forebay.buffer.conservation import imbalances, ledger_response
from forebay.buffer.errors import JournalFailed
from forebay.buffer.journal import Journal
from forebay.buffer.ledger import State
from forebay.buffer.records import Position, Scan, Tail
from forebay.wire.v1 import journal_pb2
from forebay.wire.version import Version
from tests.buffer.conftest import Serve, Served
from tests.buffer.support import UnsyncedDisk, anchor, frame_of, join_learner, join_sampler, produce
from tests.buffer.test_experience import raw_append
from tests.faults.failing import FailingDisk, StallingDisk

V0 = Version(1, 0)
SMALL_ROOM_BYTES = 24 << 20


async def happens(event: Any) -> None:
    """Wait for a threading.Event."""
    assert await asyncio.to_thread(event.wait, 30)


def fresh_journal(folder: Path, disk: FailingDisk) -> Journal:
    tail = Tail(segment=1, offset=28, lsn=1, salt=b"")
    return Journal(folder, tail, disk=disk, segment_bytes=400, room_retry_s=0.001)


def test_no_room_at_each_write(tmp_path: Path) -> None:
    """Row 13: whichever write finds the disk full, the journal waits, and everything is there once there is room."""
    for point in itertools.count(1):
        folder, disk = tmp_path / str(point), FailingDisk()
        folder.mkdir()
        disk.fail_at_write, disk.room_after = point, 3
        journal = fresh_journal(folder, disk)
        for number in range(6):
            journal.append(journal_pb2.Event(paused=journal_pb2.Paused(reason=str(number))), bytes(100))
            journal.flush()
        assert not journal.full
        disk.fail_at_write = 0
        journal.close()
        reasons = [record.event.paused.reason for record in Scan(folder, repair=False)]
        assert reasons[:6] == ["0", "1", "2", "3", "4", "5"]
        if not disk.refusals:
            break
        assert disk.refusals == 3
    assert point >= 9


@pytest.mark.parametrize(("call", "number"), [("failing_sync", errno.EIO), ("failing", errno.EROFS)])
async def test_a_disk_that_fails_ends_the_service_and_keeps_its_promises(serve: Serve, call: str, number: int) -> None:
    """Rows 12, 14: no acknowledgement, no second try, NOT_SERVING; after a restart the frame arrives once."""
    disk = FailingDisk()
    async with serve(disk=disk) as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(2, V0, 0.0)).permits)
        await sampler.append(lambda sequence: frame_of(sampler.member, sequence, permits[:1], V0))
        setattr(disk, call, number)
        appending = asyncio.create_task(
            sampler.append(lambda sequence: frame_of(sampler.member, sequence, permits[1:], V0))
        )
        failure = await served.reservoir.failed()
        assert not appending.done()
        assert disk.refusals == 1
        assert "restart" in str(failure)
        with pytest.raises(JournalFailed):
            await served.reservoir.durable()
        appending.cancel()
        member, frame = sampler.member, frame_of(sampler.member, 1, permits[1:], V0)
        before = served.reservoir.state
    async with serve() as served, served.client() as sampler:
        assert served.reservoir.state.committed == before.committed
        assert 0 in served.reservoir.state.buffered
        sampler._member = member
        outcomes = await resend(sampler, frame)
        assert outcomes in ([1], [2])  # STORED, or DUPLICATE when the failed sync had kept it
        assert sorted(served.reservoir.state.buffered) == [0, 1]


async def resend(client: BufferClient, frame: Any) -> list[int]:
    return [int(answer.outcome) for answer in await raw_append(client, frame)]


async def test_a_sync_that_stalls(serve: Serve) -> None:
    """Row 15: 10 s without a sync are backpressure, no loss, and no member is taken for lost."""
    disk = StallingDisk()
    async with (
        serve(disk=disk, buffer={"memory_mb": 1}) as served,
        served.client() as learner,
        served.client() as sampler,
    ):
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(4, V0, 0.0)).permits)
        disk.gate.clear()
        appends = [asyncio.create_task(_append_big(sampler, permit, 700_000)) for permit in permits]
        await happens(disk.waiting)
        while served.reservoir.memory_left_bytes:
            await sampler.heartbeat("generating", 0.0, V0, b"", {})
        for _ in range(4):
            served.clock.now += 2.5
            await sampler.heartbeat("generating", 0.0, V0, b"", {})
            assert served.roster.sweep() == []
        assert served.reservoir.journal.pending_bytes < 2 << 20
        assert "memory_mb = 1" in served.reservoir.no_room()
        assert not any(task.done() for task in appends)
        disk.gate.set()
        await asyncio.gather(*appends)
        assert sorted(served.reservoir.state.buffered) == [0, 1, 2, 3]
        assert isinstance(await learner.lease(1, 5.0), Lease)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_ROOM_BYTES}", "tmpfs", str(folder)]
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a small file system needs the right to mount one: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_full_disk(small_disk: Path, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 13: appends are pushed back, leases and commits go on, and room mends it; a real file system of 24 MiB."""
    monkeypatch.setattr("forebay.buffer.reservoir.RESERVE_BYTES", 4 << 20)
    (tmp_path / "run").symlink_to(small_disk)
    (small_disk / "ballast").write_bytes(bytes(8 << 20))
    async with (
        asyncio.timeout(60),
        # Little memory is little credit, so that frames are left to push back when the disk is full.
        serve(disk=UnsyncedDisk(), steps=8, max_staleness=7, buffer={"memory_mb": 2}) as served,
        served.client() as learner,
        served.client() as sampler,
    ):
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(16, V0, 0.0)).permits)
        appends = [asyncio.create_task(_append_big(sampler, permit, 1 << 20)) for permit in permits]
        while not sampler._outbox or sampler._outbox.pushback != "the buffer's disk is full":
            done, _ = await asyncio.wait(appends, timeout=0.05)
            assert len(done) < len(appends), "the disk was never full"
        assert len(served.reservoir.state.buffered) >= 4
        for step in (1, 2):
            assert isinstance(await learner.lease(step, 5.0), Lease)
            await learner.commit(step, step, {})
        assert sampler._outbox.pushback
        (small_disk / "ballast").unlink()
        await asyncio.gather(*appends)
        rows = served.reservoir.state.rows()
        assert sum(counts.groups for (*_, name), counts in rows.items() if name == "produced") == 16
        assert imbalances(await learner.ledger()) == []


async def _append_big(sampler: BufferClient, permit: Any, filler: int) -> None:
    await sampler.append(lambda sequence: frame_of(sampler.member, sequence, [permit], V0, filler=filler))


@pytest.mark.parametrize("half_applied", [False, True])
async def test_no_memory_at_each_event(serve: Serve, monkeypatch: pytest.MonkeyPatch, half_applied: bool) -> None:
    """Row 16: the request fails, the buffer says that it must restart, and finds everything it had promised."""
    apply, left = State.apply, 0

    def scarce(state: State, event: journal_pb2.Event, position: Position) -> None:
        nonlocal left
        left -= 1
        if left or half_applied:
            apply(state, event, position)
        if not left:
            raise MemoryError

    for fail_at in itertools.count(1):
        async with serve() as served, served.client() as learner, served.client() as sampler:
            with monkeypatch.context() as patch:
                patch.setattr(State, "apply", scarce)
                left, promised = fail_at, list[int]()
                failed = await _failed(_some_life(served, learner, sampler, promised))
            with contextlib.suppress(TimeoutError):  # whatever comes after it must not spoil the journal
                async with asyncio.timeout(0.2):
                    await sampler.join("sampler", "another", "fleet", "here", served.reservoir.state.run_json)
            assert served.reservoir.failure.done() == failed
            home = served.run.run.home
        async with serve() as served:
            assert sorted(served.reservoir.state.groups) >= promised
            assert imbalances(ledger_response(served.reservoir.state)) == []
        shutil.rmtree(home)
        if not failed:
            break
    assert fail_at >= 8


async def _failed(life: Awaitable[None]) -> bool:
    try:
        await life
    except (Refused, TimeoutError):
        return True
    return False


async def _some_life(served: Served, learner: BufferClient, sampler: BufferClient, promised: list[int]) -> None:
    async with asyncio.timeout(0.7):
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        promised += await produce(sampler, 2, V0)
        await learner.lease(1, 5.0)
        await learner.commit(1, 0, {})
        await learner.publish(anchor(Version(1, 1), seed=1))
