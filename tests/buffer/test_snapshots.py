"""Snapshots: a restart from one finds what the journal says, a damaged one is passed over, what it covers may go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.buffer import snapshots
from forebay.buffer.client import BufferClient, Lease
from forebay.buffer.conservation import imbalances, ledger_response
from forebay.buffer.disk import Disk
from forebay.buffer.errors import JournalDamaged
from forebay.buffer.records import Position, Scan, segment_path
from forebay.buffer.recovery import recover
from forebay.buffer.reservoir import open_reservoir
from forebay.buffer.retention import Retention
from forebay.buffer.server import serving
from forebay.buffer.state_snapshot import to_message
from forebay.config.models import RunFile
from forebay.wire.version import Version
from tests.buffer.support import FakeClock, UnsyncedDisk, join_learner, join_sampler, make_run, produce

V0 = Version(1, 0)
DEADLINE_S = 30.0


async def fill(run: RunFile, steps: int, *, until_snapshots: int = 0, segment_bytes: int = 1000) -> None:
    """Train `steps` steps in small segments; stay until there are as many snapshots as wanted."""
    reservoir = open_reservoir(run, clock=FakeClock(), disk=UnsyncedDisk(), segment_bytes=segment_bytes)
    async with serving(reservoir) as server:
        address = f"127.0.0.1:{server.port}"
        async with BufferClient(address) as learner, BufferClient(address) as sampler:
            await join_learner(learner, run)
            await join_sampler(sampler, run)
            await produce(sampler, 2 * steps + 2, V0)
            for step in range(1, steps + 1):
                assert isinstance(await learner.lease(step, 1.0), Lease)
                await learner.commit(step, step, {"loss": 0.5})
            await asyncio.wait_for(
                until(lambda: len(snapshots.numbers(journal_of(run))) >= until_snapshots), DEADLINE_S
            )


async def until(condition: Callable[[], bool]) -> None:
    """Another process makes it true."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def journal_of(run: RunFile) -> Path:
    return run.run.home / "buffer" / "journal"


def small_run(folder: Path, **buffer: Any) -> RunFile:
    return make_run(folder / "run", steps=20, max_staleness=20, keep_checkpoints=1, buffer=buffer)


def sealed(folder: Path) -> int:
    return max(int(path.stem) for path in folder.glob("*.journal")) - 1


async def test_a_restart_from_a_snapshot_finds_what_the_whole_journal_says(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    await fill(run, steps=6)
    folder = journal_of(run)
    for path in folder.glob("*.snapshot"):
        path.unlink()
    whole = recover(folder, repair=False)
    assert sealed(folder) >= 4
    for segment in range(1, sealed(folder) + 1):
        path = snapshots.make(folder, segment, retain_bytes=10**9)
        assert path.exists()
        found = recover(folder, repair=False)
        assert found.state == whole.state
        assert found.tail == whole.tail
        assert [position.lsn for position in found.released] == [position.lsn for position in whole.released]
    assert snapshots.numbers(folder) == [sealed(folder) - 1, sealed(folder)], "the two newest are kept"


async def test_the_running_buffer_makes_snapshots_and_deletes_what_they_cover(tmp_path: Path) -> None:
    run = small_run(tmp_path, retain_gb=0)
    await fill(run, steps=12, until_snapshots=2)
    await fill_again(run)
    folder = journal_of(run)
    oldest_kept = min(snapshots.numbers(folder))
    state = recover(folder, repair=False).state
    assert not segment_path(folder, 1).exists()
    assert segment_path(folder, oldest_kept + 1).exists(), "the older snapshot needs it, should the newer be damaged"
    assert imbalances(ledger_response(state)) == []
    assert state.committed == 12


async def fill_again(run: RunFile) -> None:
    """Serve until the first segment is gone."""
    reservoir = open_reservoir(run, clock=FakeClock(), disk=UnsyncedDisk(), segment_bytes=1000)
    async with serving(reservoir) as server, BufferClient(f"127.0.0.1:{server.port}") as sampler:
        await join_sampler(sampler, run, "again")
        for _ in range(60):
            await sampler.join("sampler", "again", "fleet", "here", reservoir.state.run_json)
        await until(lambda: not segment_path(journal_of(run), 1).exists())


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-5], lambda data: data[:40] + b"?" + data[41:]]
)
async def test_a_damaged_snapshot_is_passed_over(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = small_run(tmp_path)
    await fill(run, steps=6)
    folder = journal_of(run)
    for segment in (sealed(folder) - 1, sealed(folder)):
        snapshots.make(folder, segment, retain_bytes=0)
    whole = recover(folder, repair=False).state
    newest = snapshots.snapshot_path(folder, sealed(folder))
    newest.write_bytes(damage(newest.read_bytes()))
    assert recover(folder, repair=False).state == whole
    assert newest.name in caplog.text


async def test_damage_behind_the_snapshot_is_still_found(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    await fill(run, steps=6)
    folder = journal_of(run)
    snapshots.make(folder, 1, retain_bytes=0)
    for number in snapshots.numbers(folder):
        if number > 1:
            snapshots.snapshot_path(folder, number).unlink()
    segment_path(folder, 2).unlink()
    with pytest.raises(JournalDamaged, match=r"segments \[2\] are missing"):
        recover(folder, repair=False)


async def test_a_crash_while_a_snapshot_is_written_leaves_the_old_one(tmp_path: Path) -> None:
    class Crash(Exception):
        pass

    class CrashingDisk(Disk):
        def sync_folder(self, folder: Path) -> None:
            raise Crash

        def sync(self, fd: int) -> None:
            if self.early:
                raise Crash

        early = True

    run = small_run(tmp_path)
    await fill(run, steps=6)
    folder = journal_of(run)
    for path in folder.glob("*.snapshot"):
        path.unlink()
    whole = recover(folder, repair=False).state
    disk = CrashingDisk()
    for disk.early, there in ((True, []), (False, [1])):  # before the rename, and between it and the folder's sync
        with pytest.raises(Crash):
            snapshots.make(folder, 1, retain_bytes=0, disk=disk)
        assert snapshots.numbers(folder) == there
        assert recover(folder, repair=False).state == whole
    reservoir = open_reservoir(run, clock=FakeClock(), disk=UnsyncedDisk())
    reservoir.close()
    assert list(folder.glob("*.tmp")) == []


async def test_snapshots_list_what_is_kept_for_replay(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    await fill(run, steps=6)
    folder = journal_of(run)
    released = recover(folder, repair=False).released
    assert len(released) == 12, "one frame a group, two groups a step, every step final"
    assert all(record.intact for record in Scan(folder, repair=False)), "[buffer] retain_gb keeps them"
    room = sum(position.payload_bytes for position in released[-3:])
    assert snapshots.youngest(released, room) == released[-3:]
    assert snapshots.youngest(released, room - 1) == released[-2:]
    message = to_message(recover(folder, repair=False).state, released[-3:])
    assert list(message.released.lsn) == [position.lsn for position in released[-3:]]


async def test_without_retention_trained_payloads_are_given_back(tmp_path: Path) -> None:
    run = small_run(tmp_path, retain_gb=0)
    await fill(run, steps=6, segment_bytes=1 << 20)
    released = [record for record in Scan(journal_of(run), repair=False) if not record.intact]
    assert len(released) == 11, "all 12; but the first one's payload is zeros by itself"


def position(lsn: int, size: int) -> Position:
    return Position(lsn=lsn, segment=lsn, offset=0, event_bytes=0, payload_bytes=size)


def test_retention_gives_back_the_earliest_beyond_its_bytes_its_age_or_when_room_is_needed() -> None:
    clock = FakeClock()
    kept = Retention(limit_bytes=100, limit_s=60.0, clock=clock)
    kept.keep([position(1, 60), position(2, 60)])
    assert [one.lsn for one in kept.due(make_room=False)] == [1]
    assert (kept.bytes, kept.first_segment) == (60, 2)
    clock.now += 61
    kept.keep([position(3, 10)])
    assert [one.lsn for one in kept.due(make_room=False)] == [2]
    assert [one.lsn for one in kept.due(make_room=True)] == [3]
    assert (kept.bytes, kept.first_segment) == (0, None)
