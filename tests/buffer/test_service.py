"""The real process: started, killed, told to stop, started where it cannot run."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.buffer.client import BufferClient, Lease
from forebay.buffer.conservation import imbalances, ledger_of
from forebay.buffer.ports import holder_of
from forebay.buffer.service import serve
from forebay.config.models import RunFile
from forebay.errors import UsageError
from forebay.loopback import free_addresses
from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version
from tests.buffer.support import frame_of, join_learner, join_sampler, make_run

V0 = Version(1, 0)
_PROGRAM = """
import sys
from forebay.buffer.service import serve
from forebay.config.models import RunFile
from forebay.obs.log import setup_logging
setup_logging("buffer")
sys.exit(serve(RunFile.model_validate_json(sys.argv[1])))
"""


def listening_run(folder: Path, **learner: Any) -> RunFile:
    buffer = dict(zip(("listen", "http"), free_addresses(2), strict=True))
    return make_run(folder, buffer=buffer, **learner)


@contextmanager
def started(run: RunFile) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, run.model_dump_json()], stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_killed_under_load_everything_acknowledged_is_there_once(tmp_path: Path) -> None:
    """kill -9, three times, while two samplers append as fast as they can."""
    run = listening_run(tmp_path, steps=2000, max_staleness=1500)
    acknowledged: list[int] = []
    enough = asyncio.Event()

    async def sample(name: str) -> None:
        async with BufferClient(run.buffer.listen, on_trouble=lambda line: None) as client:
            await join_sampler(client, run, name)
            while True:
                permits = list((await client.admit(40, V0, 5.0)).permits)
                await asyncio.gather(*(append(client, permit) for permit in permits))

    async def append(client: BufferClient, permit: experience_pb2.Permit) -> None:
        await client.append(lambda sequence: frame_of(client.member, sequence, [permit], V0, filler=2000))
        acknowledged.append(permit.group_id)
        if len(acknowledged) % 150 == 0:
            enough.set()

    async with BufferClient(run.buffer.listen, on_trouble=lambda line: None) as learner:
        samplers = []
        for kill in range(3):
            with started(run) as process:
                if kill == 0:
                    await join_learner(learner, run)
                    samplers = [asyncio.create_task(sample(name)) for name in ("a", "b")]
                enough.clear()
                await asyncio.wait_for(enough.wait(), 60)
                process.send_signal(signal.SIGKILL)
        with started(run):
            seen: list[int] = []
            for step in range(1, 101):
                lease = await learner.lease(step, 10.0)
                assert isinstance(lease, Lease)
                seen += lease.group_ids
                await learner.commit(step, step, {})
            await asyncio.gather(*map(cancelled, samplers))
            assert len(seen) == len(set(seen))
            ledger = await learner.ledger()
            assert imbalances(ledger) == []
    assert len(acknowledged) == len(set(acknowledged)) >= 450
    offline = ledger_of(run.run.home / "buffer" / "journal")
    assert imbalances(offline) == []
    assert sum(row.groups for row in offline.rows if row.state == "produced") >= len(acknowledged)
    assert set(acknowledged) <= groups_in(run)


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def groups_in(run: RunFile) -> set[int]:
    """Every group id in the journal's frames, each of which must be there once."""
    from forebay.buffer.records import Scan

    found = [
        group.group_id
        for record in Scan(run.run.home / "buffer" / "journal", repair=False)
        for group in record.event.appended.header.groups
        if group.group_id not in record.event.appended.superseded
    ]
    assert len(found) == len(set(found))
    return set(found)


async def test_sigterm_drains(tmp_path: Path) -> None:
    run = listening_run(tmp_path)
    with started(run) as process:
        async with BufferClient(run.buffer.listen, on_trouble=lambda line: None) as client:
            await join_learner(client, run)
            await join_sampler(client, run)
            assert Version.from_proto((await anext(client.watch())).version) == V0
            http = f"http://{run.buffer.http}"
            assert await asyncio.to_thread(get, f"{http}/healthz") == (200, "ok\n")
            assert await asyncio.to_thread(get, f"{http}/readyz") == (200, "ready\n")
            assert 'forebay_steps_wanted{run="test"} 4.0' in (await asyncio.to_thread(get, f"{http}/metrics"))[1]
            assert '"state": "running"' in (await asyncio.to_thread(get, f"{http}/status"))[1]
            assert (await asyncio.to_thread(get, f"{http}/status", method="DELETE"))[0] == 405
            assert (await asyncio.to_thread(get, f"{http}/status", host="evil.example"))[0] == 403
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 20) == 0
    assert imbalances(ledger_of(run.run.home / "buffer" / "journal")) == []


def get(url: str, *, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, method=method, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_port_in_use_names_its_holder(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert holder_of(port).startswith(f"pid {os.getpid()} (")
        run = make_run(tmp_path, buffer={"listen": f"127.0.0.1:{port}", "http": free_addresses(1)[0]})
        with pytest.raises(UsageError, match=rf"127.0.0.1:{port}: the port is in use by pid {os.getpid()}"):
            serve(run)


def test_a_second_buffer_names_the_first(tmp_path: Path) -> None:
    run = listening_run(tmp_path)
    with started(run) as process:
        assert process.stderr is not None
        process.stderr.readline()
        with pytest.raises(UsageError, match=rf"another buffer \(pid {process.pid}\) serves this run"):
            serve(run)


def test_listening_beyond_loopback_must_be_asked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path, buffer={"listen": "0.0.0.0:7070"})
    with pytest.raises(UsageError, match=r"buffer.listen: got 0.0.0.0:7070, .*insecure = true"):
        serve(run)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = make_run(tmp_path / "file")
    with pytest.raises(UsageError, match=r"cannot keep the run here"):
        serve(run)


async def test_another_run_in_the_folder(tmp_path: Path) -> None:
    from forebay.buffer.reservoir import open_reservoir

    open_reservoir(make_run(tmp_path)).close()
    with pytest.raises(UsageError, match=r"learner.steps: 4 in the run, 9 here"):
        open_reservoir(make_run(tmp_path, steps=9))
