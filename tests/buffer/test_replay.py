"""`forebay replay`: experience read back as it was sent, and batches trained again to the same bits."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.buffer.client import BlockingClient, BufferClient, Lease
from forebay.buffer.conservation import imbalances, ledger_of
from forebay.buffer.in_process import in_process
from forebay.buffer.recording import Recording, read_recording
from forebay.buffer.recovery import recover
from forebay.buffer.replay import SCHEMA, Steps, export
from forebay.buffer.replay_journal import choose_steps, write_journal
from forebay.buffer.reservoir import open_reservoir
from forebay.buffer.server import serving
from forebay.buffer.verify import Verification
from forebay.cli.main import main
from forebay.cli.replay import _compare, _prepare
from forebay.config.checkpoints import complete_steps
from forebay.config.models import RunFile
from forebay.config.steering import Steering
from forebay.config.toml_text import toml_text
from forebay.errors import UsageError
from forebay.learner.loop import run_learner
from forebay.learner.stop import Stop
from forebay.wire.experience import from_record_batch
from forebay.wire.record_batch import SCHEMA as ROWS
from forebay.wire.version import Version
from tests.buffer.conftest import Serve
from tests.buffer.support import UnsyncedDisk, anchor, join_learner, join_sampler, make_run, produce, real_frame
from tests.learner.models import tiny_llama
from tests.learner.test_with_buffer import GROUP, Sampler

V0 = Version(1, 0)


async def recorded(serve: Serve, *, keep_checkpoints: int = 1000) -> Path:
    """Three steps trained, one leased, one group buffered; every group with another reward. Returns the run folder."""
    async with (
        serve(keep_checkpoints=keep_checkpoints, buffer={"retain_gb": 0}) as served,
        served.client() as learner,
        served.client() as s,
    ):
        await join_learner(learner, served.run)
        await join_sampler(s, served.run)
        for step in range(1, 5):
            await append_real(s, 2, Version(1, step - 1))
            assert isinstance(await learner.lease(step, 1.0), Lease)
            if step < 4:
                await learner.commit(step, step, {})
                await learner.publish(anchor(Version(1, step), seed=step))
        assert len(served.reservoir.state.batches) == (4 if keep_checkpoints > 4 else 1 + keep_checkpoints - 1)
        return served.run.run.home


async def append_real(client: BufferClient, groups: int, version: Version) -> None:
    """One frame of several groups, as a sampler encodes it."""
    permits = list((await client.admit(groups, version, 1.0)).permits)
    assert len(permits) == groups
    await client.append(lambda n: real_frame(n, member=client.member, permits=permits, version=version))


def table_of(path: Path) -> pa.Table:
    return pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(path).read_all()


@pytest.mark.parametrize("name", ["out.parquet", "out.arrow"])
async def test_experience_is_read_back_as_it_was_sent(serve: Serve, tmp_path: Path, name: str) -> None:
    home = await recorded(serve)
    found = export(read_recording(home), tmp_path / name, Steps())
    table = table_of(tmp_path / name)
    assert table.schema.names == SCHEMA.names
    assert found.rows == len(table) == 16
    assert found.groups == {"trained": 6, "leased": 2}
    assert table["step"].to_pylist() == [step for step in (1, 2, 3, 4) for _ in range(4)]
    assert table["state"].to_pylist() == ["trained"] * 12 + ["leased"] * 4
    rows = table.select(ROWS.names).cast(ROWS).combine_chunks().to_batches()[0]  # Parquet names list items otherwise
    trajectories = from_record_batch(rows)
    assert [member.group_id for member in trajectories] == [group for group in range(8) for _ in range(2)]
    assert all(np.array_equal(member.tokens, np.full(5, member.group_id)) for member in trajectories)
    assert sorted(os.listdir(tmp_path)) == [name, "run"]


async def test_steps_and_what_was_released(serve: Serve, tmp_path: Path) -> None:
    home = await recorded(serve, keep_checkpoints=1)
    recording = read_recording(home)
    found = export(recording, tmp_path / "all.parquet", Steps())
    assert set(table_of(tmp_path / "all.parquet")["step"].to_pylist()) == {4}
    assert found.in_words(recording)[1] == (
        "not written: 3 frames with 6 groups whose payload was released (steps 1 to 3)"
    )
    found = export(recording, tmp_path / "some.arrow", Steps.parse("2:3"))
    assert (found.rows, found.released_frames) == (0, 2)
    with pytest.raises(UsageError, match=r"step 1 is released; no step of this run can be replayed any more"):
        choose_steps(recording, Steps(), [3])


async def test_rows_are_written_as_they_gather(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = await recorded(serve)
    monkeypatch.setattr("forebay.buffer.replay.BATCH_BYTES", 1)
    export(read_recording(home), tmp_path / "out.parquet", Steps())
    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == 4


@pytest.mark.parametrize(("text", "held"), [("2:3", [2, 3]), ("3:", [3, 4]), (":2", [1, 2]), ("4", [4])])
def test_ranges_of_steps(text: str, held: list[int]) -> None:
    steps = Steps.parse(text)
    assert [step for step in range(1, 5) if steps.hold([step])] == held
    assert not steps.hold([])


@pytest.mark.parametrize("text", [":", "", "0:3", "3:1", "a:b", "1:2:3", "-1"])
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="expected A:B"):
        Steps.parse(text)


def test_which_steps_can_be_replayed() -> None:
    recording = Recording(Path(), run_json="", committed=9, learner_incarnation=1, published={})
    recording.batches = {step: (step,) for step in range(1, 11)}
    recording.frames = {group: group for group in range(1, 11)}
    assert choose_steps(recording, Steps(), []) == range(1, 10)
    assert choose_steps(recording, Steps.parse(":4"), []) == range(1, 5)
    assert choose_steps(recording, Steps.parse("5:"), [4]) == range(5, 10)
    with pytest.raises(UsageError, match=r"there is no checkpoint 2 to start from; possible: --steps 1:9"):
        choose_steps(recording, Steps.parse("3:"), [4])
    with pytest.raises(UsageError, match="committed 9 steps"):
        choose_steps(recording, Steps.parse("1:10"), [])
    recording.released = {1, 2}
    with pytest.raises(UsageError, match=r"steps 1 to 1 .*step 1 is released; possible: --steps 5:9"):
        choose_steps(recording, Steps(), [2, 4][1:])


async def test_groups_that_several_steps_had_and_dead_letters(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=8, max_staleness=4, selector="uniform", max_times_sampled=2)
    reservoir = open_reservoir(run, disk=UnsyncedDisk())
    async with in_process(reservoir) as buffer, buffer.client() as learner, buffer.client() as s:
        await join_learner(learner, run)
        await join_sampler(s, run)
        await append_real(s, 5, V0)
        for step in (1, 2, 3):
            lease = await leased(learner, step)
            if step == 2:
                poison = lease.group_ids[0]
                await learner.reject(lease, [poison], "unreadable")
                await leased(learner, step)
            await learner.commit(step, 0, {})
        lease = await leased(learner, 4)
        await learner.reject(lease, lease.group_ids, "unreadable")
    recording = read_recording(run.run.home)
    assert sorted(recording.batches) == [1, 2, 3]
    assert {group for steps in recording.batches.values() for group in steps} == recording.steps.keys()
    assert max(len(steps) for steps in recording.steps.values()) == 2
    assert poison in recording.steps or recording.state_of(poison) == "dropped:dead_letter"
    found = export(recording, tmp_path / "x.arrow", Steps())
    assert found.groups.total() == 5
    assert found.groups["trained"] == len(recording.steps)
    journal = tmp_path / "again"
    journal.mkdir()
    write_journal(recording, range(1, 4), journal)
    state = recover(journal, repair=False).state
    assert {step: batch.group_ids for step, batch in state.batches.items()} == recording.batches
    assert len(state.buffered) == 0
    assert not imbalances(ledger_of(journal))


async def leased(learner: BufferClient, step: int) -> Lease:
    lease = await learner.lease(step, 1.0)
    assert isinstance(lease, Lease)
    return lease


async def test_a_file_that_cannot_be_written(serve: Serve, tmp_path: Path) -> None:
    home = await recorded(serve)
    for target, said in ((tmp_path / "x.csv", r"\.parquet or \.arrow"), (tmp_path / "no" / "x.arrow", "cannot write")):
        with pytest.raises(UsageError, match=said):
            export(read_recording(home), target, Steps())


async def test_frames_that_do_not_decode_are_counted(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The buffer never opens a payload, so anything may be in one."""
    async with serve() as served, served.client() as learner, served.client() as s:
        await join_learner(learner, served.run)
        await join_sampler(s, served.run)
        await produce(s, 2, V0)
        await append_real(s, 1, V0)
        home = served.run.run.home
    assert main(["replay", str(home), "--to", str(tmp_path / "x.arrow")]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("2 trajectories of 1 groups: 1 buffered")
    assert said[1].startswith("not readable: 2 frames; the first: LSN ")


async def test_the_command_on_a_run_folder(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = await recorded(serve)
    assert main(["replay", str(home), "--to", str(tmp_path / "x.arrow"), "--steps", "1:2"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'x.arrow'}: 8 trajectories of 4 groups: 4 trained\n"


# --- training again

#: What torch's distributed runtime reads.
ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")


def run_file(folder: Path, home: Path) -> RunFile:
    """Six steps of a tiny model, on policy or one step behind."""
    return RunFile.model_validate(
        {
            "run": {"name": "test", "folder": home},
            "model": {"path": str(folder / "model")},
            "task": {"name": "none", "heldout_prompts": 20},
            "learner": {
                "steps": 6, "groups_per_step": 3, "group_size": GROUP, "max_staleness": 1, "lr": 1e-2,
                "minibatches": 2, "compute_dtype": "float32", "zero_stage": 0, "checkpoint_every_steps": 2,
                "keep_checkpoints": 1000,
            },
            "publish": {"every_steps": 1, "dtype": "float32"},
        }
    )  # fmt: skip


class CommittingClient(BlockingClient):
    """Asks the learner to stop once a step is committed."""

    def __init__(self, address: str, stop: Stop, last: int) -> None:
        super().__init__(address)
        self._stop, self._last = stop, last

    def commit(self, step: int, checkpoint_step: int, metrics: Any, attempt: int = 0) -> None:
        super().commit(step, checkpoint_step, metrics, attempt)
        if step == self._last:
            self._stop.ask("test")


def learn(run: RunFile, address: str, last: int) -> int:
    stop = Stop()
    with CommittingClient(address, stop, last) as client:
        return run_learner(run, client, stop)


async def record(run: RunFile, last: int) -> None:
    """The run, trained until `last` with a learner that starts anew after step 3, from then on at half the rate."""
    async with serving(open_reservoir(run), listen="127.0.0.1:0") as server:
        client = BufferClient(server.address)
        sampling = asyncio.create_task(Sampler(client).work(run))
        for until in (3, last):
            assert await asyncio.to_thread(learn, run, server.address, until) == 0
            Steering().changed(3, {"learner.lr": 5e-3}).write(run.run.home)
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await client.close()


async def train_again(run: RunFile, steps: range) -> Recording:
    """What `forebay replay --train` does, in this process."""
    async with serving(open_reservoir(run), listen="127.0.0.1:0") as server:
        assert await asyncio.to_thread(learn, run, server.address, steps[-1]) == 0
        assert not server.reservoirs[0].state.permits
    return read_recording(run.run.home)


@pytest.mark.parametrize("first", [1, 5])
async def test_recorded_batches_train_to_the_same_weights(tmp_path: Path, first: int) -> None:
    """From the initial weights, and from a checkpoint."""
    tiny_llama().save_pretrained(tmp_path / "model")
    run, again = run_file(tmp_path, tmp_path / "run"), run_file(tmp_path, tmp_path / "again")
    await record(run, 5)
    recording = read_recording(run.run.home)
    steps = choose_steps(recording, Steps(first=first), complete_steps(run.run.home))
    assert steps == range(first, 6)
    _prepare(again, run.run.home, recording, steps)
    replayed = await train_again(again, steps)
    assert {step: replayed.batches[step] for step in steps} == {step: recording.batches[step] for step in steps}
    both = sorted(recording.published.keys() & replayed.published.keys())
    assert both[0] == first - 1
    assert both[-1] == 5
    assert [recording.published[step] == replayed.published[step] for step in both] == [True] * len(both)
    assert len({recording.published[step] for step in both}) == len(both), "training changes the weights"
    assert not imbalances(ledger_of(again.run.home / "buffer" / "journal"))
    assert Verification(again.run.home, lambda line: None).run()


def test_what_is_said_of_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    def recording(**published: bytes) -> Recording:
        known = {int(step[1:]): digest for step, digest in published.items()}
        return Recording(Path(), run_json="", committed=3, learner_incarnation=1, published=known)

    recorded = recording(_0=b"a", _1=b"b", _3=b"d")
    assert _compare(recorded, recording(_0=b"a", _1=b"b", _2=b"c"), range(1, 4)) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "step 1: same weights",
        "all 2 versions are the same, bit for bit",
    ]
    assert _compare(recorded, recording(_0=b"a", _1=b"x", _3=b"y"), range(1, 4)) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "step 1: differs",
        "step 3: differs",
        "2 of 3 versions differ, the first is step 1",
    ]
    assert _compare(recorded, recording(_2=b"c"), range(1, 4)) == 1


@pytest.mark.end_to_end
async def test_the_command_trains_again(tmp_path: Path) -> None:
    """Real buffer, real learner, no sampler; the recorded run stopped one step before its end."""
    tiny_llama().save_pretrained(tmp_path / "model")
    run = run_file(tmp_path, tmp_path / "run")
    await record(run, 5)
    (tmp_path / "run.toml").write_text(toml_text(run.model_dump(mode="json")))
    code, out, _ = await replay(tmp_path)
    assert code == 0, out
    assert "step 0: same weights" in out
    assert "step 5: same weights" in out
    assert out.splitlines()[-1].endswith("versions are the same, bit for bit")
    code, _, err = await replay(tmp_path)
    assert (code, "holds a run already" in err) == (2, True)
    code, _, err = await replay(tmp_path, "--learner.lr=2e-2")
    assert (code, "learner.lr: 0.01 in the run, 0.02 here" in err) == (2, True)


async def replay(folder: Path, *words: str) -> tuple[int, str, str]:
    """`forebay replay run.toml --train`."""
    command = [sys.executable, "-m", "forebay.cli.main", "replay", "run.toml", "--train", *words]
    done: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
    # The learner in this process has left its own rendezvous there.
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    result = await asyncio.to_thread(
        done, command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    return result.returncode, result.stdout, result.stderr
