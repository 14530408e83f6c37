"""`forebay buffer --verify`: what is whole is called whole, what is damaged is named to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.buffer import snapshots
from forebay.buffer.client import Lease
from forebay.buffer.in_process import in_process
from forebay.buffer.journal import Journal
from forebay.buffer.records import Position, Tail, segment_path
from forebay.buffer.reservoir import open_reservoir
from forebay.buffer.segment_walk import read_records
from forebay.buffer.verify import Verification
from forebay.cli.main import main
from forebay.errors import UsageError
from forebay.wire.v1 import common_pb2, experience_pb2, journal_pb2
from forebay.wire.version import Version
from tests.buffer.conftest import Serve
from tests.buffer.support import UnsyncedDisk, anchor, frame_of, join_learner, join_sampler, make_run, produce

V0 = Version(1, 0)
SAMPLER = common_pb2.Member(role=common_pb2.ROLE_SAMPLER, id="s", incarnation=1)


def check(home: Path) -> tuple[bool, list[str], list[str]]:
    """Whether it is whole, what was said, what is wrong."""
    said: list[str] = []
    verification = Verification(home, said.append)
    return verification.run(), said, verification.problems


async def filled(serve: Serve) -> Path:
    """A run with two steps trained (one of them final), weights, and groups in the buffer, closed in order."""
    async with serve(keep_checkpoints=1) as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        for step in (1, 2):
            await produce(sampler, 4, Version(1, step - 1))
            assert isinstance(await learner.lease(step, 1.0), Lease)
            await learner.commit(step, 1, {})
            await learner.publish(anchor(Version(1, step), seed=step))
        await produce(sampler, 2, Version(1, 2))
        home = served.run.run.home
        assert check(home)[0], "beside the running buffer"
    return home


def journal(home: Path, payloads: list[bytes], *, segment_bytes: int = 1 << 20) -> tuple[Path, list[Position]]:
    """A closed journal of harmless events with these payloads."""
    folder = home / "buffer" / "journal"
    folder.mkdir(parents=True)
    writer = Journal(folder, Tail(segment=1, offset=28, lsn=1, salt=b""), segment_bytes=segment_bytes)
    positions = [writer.append(journal_pb2.Event(resumed=journal_pb2.Resumed()), payload) for payload in payloads]
    writer.close()
    return folder, positions


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


async def test_a_whole_run(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    home = await filled(serve)
    whole, said, problems = check(home)
    assert (whole, problems) == (True, [])
    assert said[0].startswith("00000001.journal: LSN 1 to ")
    assert "released; whole" in said[0]
    assert "payloads: 0 whole" not in said[0]
    assert any(line.startswith("state: step 2 committed, checkpoint 1, final 1; ") for line in said)
    assert any(line.startswith("conservation: produced = ") for line in said)
    assert said[-1].startswith("weights: ")
    assert said[-1].endswith("all match their digests")
    assert main(["buffer", str(home), "--verify"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{home}: whole"


async def test_every_run_of_a_buffer_is_checked(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = await filled(serve)
    journal(tmp_path / "other", [b"x"])
    assert main(["buffer", str(home), "--also", str(tmp_path / "other"), "--verify"]) == 0
    flip(segment_path(home / "buffer" / "journal", 1), 40)
    assert main(["buffer", str(home), "--also", str(tmp_path / "other"), "--verify"]) == 1
    assert f"{tmp_path / 'other'}: whole" in capsys.readouterr().out


async def test_a_damaged_record_is_named_with_the_lost_lsn(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    home = await filled(serve)
    path = segment_path(home / "buffer" / "journal", 1)
    flip(path, 40)
    assert main(["buffer", str(home), "--verify"]) == 1
    shown = capsys.readouterr().out
    assert f"DAMAGED: {path}: damaged at offset 28: LSN 1 to 1 lost: restore this file from a copy" in shown
    assert "state: not folded" in shown


def test_several_damages_of_one_segment_are_all_named(tmp_path: Path) -> None:
    folder, positions = journal(tmp_path, [b"x" * 100] * 8)
    path = segment_path(folder, 1)
    for index in (2, 3, 5):
        flip(path, positions[index].offset + 14)  # in the header
    _, _, problems = check(tmp_path)
    assert [problem.split(": restore")[0] for problem in problems] == [
        f"{path}: damaged at offset {positions[2].offset}: LSN 3 to 4 lost",
        f"{path}: damaged at offset {positions[5].offset}: LSN 6 to 6 lost",
    ]


def test_what_a_cut_segment_lost_is_known_from_the_next(tmp_path: Path) -> None:
    folder, positions = journal(tmp_path, [b"x" * 300] * 6, segment_bytes=1200)
    first = segment_path(folder, 1)
    assert [position.segment for position in positions] == [1, 1, 1, 2, 2, 2]
    first.write_bytes(first.read_bytes()[: positions[1].offset + 10])
    _, said, problems = check(tmp_path)
    assert problems[0].startswith(f"{first}: damaged at offset {positions[1].offset}: LSN 2 to 3 lost: ")
    assert said[0].endswith("DAMAGED")
    assert said[1].startswith("DAMAGED: ")
    assert said[2].endswith("; whole")


def test_a_missing_and_a_headless_segment(tmp_path: Path) -> None:
    folder, positions = journal(tmp_path, [b"x" * 900] * 4, segment_bytes=1000)
    flip(segment_path(folder, 3), 3)
    assert [problem.split(": restore")[0] for problem in check(tmp_path)[2]] == [
        f"{segment_path(folder, 3)}: damaged at offset 0: LSN 3 to 3 lost"
    ]
    segment_path(folder, 3).unlink()
    problems = check(tmp_path)[2]
    assert problems[0].startswith(f"{folder}: segment 00000003 is missing: put it back")
    assert problems[1].startswith(f"{segment_path(folder, 4)}: begins with LSN {positions[3].lsn}, expected 3")


def test_rubbish_behind_a_sealed_segment_loses_nothing(tmp_path: Path) -> None:
    folder, positions = journal(tmp_path, [b"x" * 900] * 2, segment_bytes=1000)
    first = segment_path(folder, 1)
    first.write_bytes(first.read_bytes() + b"rubbish")
    remedy = f"nothing is lost: truncate -s {positions[0].end} {first}"
    assert check(tmp_path)[2] == [f"{first}: bytes that are no record at offset {positions[0].end}; {remedy}"]


async def test_a_torn_tail_is_fine_and_mentioned(serve: Serve) -> None:
    home = await filled(serve)
    path = segment_path(home / "buffer" / "journal", 1)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-3])
    whole, said, _ = check(home)
    assert whole
    assert any(line.startswith("torn tail: ") and path.name in line for line in said)
    assert path.stat().st_size == size - 3, "verifying changes nothing"


async def test_a_payload_that_a_crash_left_half_given_back(serve: Serve) -> None:
    """Nobody needs it, so the buffer starts, nothing is damaged, and what reads the journal passes over it."""
    home = await filled(serve)
    path = segment_path(home / "buffer" / "journal", 1)
    first = next(record for record in read_records(path.parent) if record.payload)
    flip(path, first.end - 5)
    whole, said, _ = check(home)
    assert whole
    assert ", 1 neither (half released by a crash, " in said[0]
    assert [record.intact for record in read_records(path.parent) if record.lsn == first.lsn] == [False]
    async with serve(keep_checkpoints=1):
        pass


async def test_a_needed_payload_that_is_half_there(serve: Serve) -> None:
    home = await filled(serve)
    folder = home / "buffer" / "journal"
    async with serve(keep_checkpoints=1) as served:
        live = list(served.reservoir.state.frames.values())[-1].position
    flip(segment_path(folder, 1), live.payload_offset)
    whole, _, problems = check(home)
    assert not whole
    assert f"(LSN {live.lsn}) is damaged, but still needed" in problems[0]


async def test_a_needed_payload_of_zeros(serve: Serve) -> None:
    home = await filled(serve)
    folder = home / "buffer" / "journal"
    async with serve(keep_checkpoints=1) as served:
        live = list(served.reservoir.state.frames.values())[-1].position
    content = bytearray(segment_path(folder, 1).read_bytes())
    content[live.payload_offset : live.end] = bytes(live.payload_bytes)
    segment_path(folder, 1).write_bytes(content)
    whole, _, problems = check(home)
    assert not whole
    assert f"(LSN {live.lsn}) is damaged, but still needed" in problems[0]


@pytest.mark.parametrize("honest", [True, False])
def test_a_live_frame_whose_payload_is_another_ones(tmp_path: Path, honest: bool) -> None:
    """The record's own checksum covers what the journal was given; the frame's covers what the sampler sent."""
    permit = experience_pb2.Permit(group_id=0, attempt=1)
    frame = frame_of(SAMPLER, 0, [permit], V0)
    whole, _, problems = check_events(
        tmp_path,
        lambda append: (
            append(journal_pb2.Event(joined=journal_pb2.Joined(member=SAMPLER, fleet="f"))),
            append(journal_pb2.Event(granted=journal_pb2.Granted(member=SAMPLER, permits=[permit]))),
            append(
                journal_pb2.Event(appended=journal_pb2.Appended(header=frame.header)),
                frame.payload if honest else frame.payload[::-1] + b"x",
            ),
        ),
    )
    assert whole == honest
    assert honest or "the payload of LSN 3 at " in problems[0]


def test_groups_that_do_not_add_up(tmp_path: Path) -> None:
    permit = experience_pb2.Permit(group_id=7, attempt=1)
    whole, _, problems = check_events(
        tmp_path,
        lambda append: (
            append(journal_pb2.Event(joined=journal_pb2.Joined(member=SAMPLER, fleet="f"))),
            append(journal_pb2.Event(granted=journal_pb2.Granted(member=SAMPLER, permits=[permit]))),
        ),
    )
    assert not whole
    assert problems[0].startswith("conservation: groups started 8 != produced 0 + refunded 0 + outstanding 1")


def check_events(home: Path, write: Callable[[Callable[..., Position]], object]) -> tuple[bool, list[str], list[str]]:
    """Check a journal of exactly these events."""
    folder = home / "buffer" / "journal"
    folder.mkdir(parents=True)
    writer = Journal(folder, Tail(segment=1, offset=28, lsn=1, salt=b""), disk=UnsyncedDisk())
    write(writer.append)
    writer.close()
    return check(home)


async def test_damaged_weights(serve: Serve) -> None:
    home = await filled(serve)
    newest = anchor(Version(1, 2), seed=2).manifest
    chunk = home / "buffer" / "weights" / "chunks" / newest.chunks[0].digest.hex()
    flip(chunk, 9)
    whole, said, problems = check(home)
    assert not whole
    assert problems[0].startswith(f"{chunk}: ")
    assert said[-1].endswith("some are damaged")
    chunk.unlink()
    assert f"1.2.manifest: 1 of its chunks are missing, the first is {chunk.name}" in check(home)[2][0]
    manifest = home / "buffer" / "weights" / "manifests" / "1.2.manifest"
    manifest.write_bytes(b"\xff\xff")
    assert check(home)[2][0].startswith(f"{manifest}: not a manifest")
    manifest.unlink()
    assert "version 1.2 was published, but no anchor leads to it" in check(home)[2][0]


async def snapshotted(tmp_path: Path) -> tuple[Path, Position, Path]:
    """A run of small segments with a snapshot of the sealed ones; a frame before it that is still needed; its file."""
    run = make_run(tmp_path / "run", max_staleness=3, keep_checkpoints=1)
    reservoir = open_reservoir(run, disk=UnsyncedDisk(), segment_bytes=700)
    async with in_process(reservoir) as buffer, buffer.client() as learner, buffer.client() as sampler:
        await join_learner(learner, run)
        await join_sampler(sampler, run)
        for step in (1, 2):
            await produce(sampler, 3, V0)
            assert isinstance(await learner.lease(step, 1.0), Lease)
            await learner.commit(step, step, {})
        sealed = reservoir.journal.sealed_segment
        live = next(entry.position for entry in reservoir.state.frames.values())
    assert sealed > 2
    assert live.segment <= sealed
    return run.run.home, live, snapshots.make(run.run.home / "buffer" / "journal", sealed, retain_bytes=0)


async def test_snapshots(tmp_path: Path) -> None:
    home, live, path = await snapshotted(tmp_path)
    whole, said, _ = check(home)
    assert whole
    assert any(line.startswith(f"{path.name}: the state before LSN ") and "as the records say" in line for line in said)
    for number in range(1, live.segment):
        segment_path(path.parent, number).unlink()
    assert check(home)[0], "the snapshot stands for the segments that are gone"
    flip(path, 30)
    whole, _, problems = check(home)
    assert not whole
    assert f"{path}: damaged: delete it, the buffer then starts from the one before" in problems[-1]


async def test_a_snapshot_that_tells_another_story(tmp_path: Path) -> None:
    home, live, path = await snapshotted(tmp_path)
    snapshot = snapshots.read(path)
    snapshot.published.add(digest=b"x", version=Version(1, 9).to_proto())
    snapshots.write(path.parent, snapshot, UnsyncedDisk())
    problems = check(home)[2]
    assert f"{path}: differs from what the records before it add up to: delete it" in problems[0]
    for number in range(1, live.segment):
        segment_path(path.parent, number).unlink()
    assert not any("differs" in problem for problem in check(home)[2]), "without the records nobody can tell"


async def test_frames_that_only_a_snapshot_knows_of(tmp_path: Path) -> None:
    home, live, path = await snapshotted(tmp_path)
    segment = segment_path(path.parent, live.segment)
    content = bytearray(segment.read_bytes())
    content[live.payload_offset : live.end] = bytes(live.payload_bytes)
    segment.write_bytes(content)
    assert check(home)[2][0].startswith(
        f"{segment}: the payload of LSN {live.lsn} at {live.offset} is zeros, but still needed"
    )
    for number in range(1, live.segment + 1):
        segment_path(path.parent, number).unlink()
    assert check(home)[2] == [f"{segment}: missing, but a snapshot says that frames in it are needed: put it back"]


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no journal here"):
        check(tmp_path)
