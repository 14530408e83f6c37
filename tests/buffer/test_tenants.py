"""Several runs in one buffer: each call finds its run, and none feels another's limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.buffer.client import BufferClient, Lease, Refused
from forebay.buffer.reservoir import open_reservoir
from forebay.buffer.server import BufferServer, serving
from forebay.buffer.service import serve
from forebay.config.models import RunFile
from forebay.errors import UsageError
from forebay.wire.version import Version
from tests.buffer.support import FakeClock, UnsyncedDisk, frame_of, join_learner, join_sampler, make_run, produce

V0 = Version(1, 0)


def runs_of(folder: Path, **buffer: Any) -> list[RunFile]:
    """Runs a and b; the buffer settings are a's."""
    return [
        make_run(folder / name, name=name, buffer=buffer if name == "a" else {}, max_staleness=3) for name in ("a", "b")
    ]


@asynccontextmanager
async def both(runs: list[RunFile]) -> AsyncIterator[BufferServer]:
    reservoirs = [open_reservoir(run, clock=FakeClock(), disk=UnsyncedDisk()) for run in runs]
    async with serving(*reservoirs, grace_s=0.0) as server:
        yield server


def client_of(server: BufferServer, **options: Any) -> BufferClient:
    return BufferClient(server.address, on_trouble=lambda line: None, **options)


async def train(server: BufferServer, run: RunFile, steps: int) -> None:
    async with client_of(server) as learner, client_of(server) as sampler:
        await join_learner(learner, run)
        await join_sampler(sampler, run)
        await produce(sampler, 2 * steps, V0)
        for step in range(1, steps + 1):
            assert isinstance(await learner.lease(step, 1.0), Lease)
            await learner.commit(step, 0, {})


async def test_each_run_has_its_own_groups_steps_and_weights(tmp_path: Path) -> None:
    runs = runs_of(tmp_path)
    async with both(runs) as server:
        await train(server, runs[0], 2)
        await train(server, runs[1], 1)
        for name, step in (("a", 2), ("b", 1)):
            async with client_of(server, run=name) as client:
                status = await client.status()
                assert (status.run, status.step, status.newest.step) == (name, step, 0)
                produced = [row.groups for row in (await client.ledger()).rows if row.state == "produced"]
                assert produced == [2 * step]
                assert len((await client.history()).steps) == step
                await client.pause(f"only {name}")
        assert [tenant.reservoir.state.paused for tenant in server.tenants] == ["only a", "only b"]


async def test_a_call_that_names_no_run_is_told_which_there_are(tmp_path: Path) -> None:
    async with both(runs_of(tmp_path)) as server:
        for name, said in (("", "which run[?] this buffer serves a, b"), ("c", "serves a, b, not c")):
            async with client_of(server, run=name) as client:
                with pytest.raises(Refused, match=said):
                    await client.status()
        stranger = make_run(tmp_path / "c", name="c")
        async with client_of(server) as client:
            with pytest.raises(Refused, match="not c"):
                await join_sampler(client, stranger)


async def test_a_run_at_its_limit_does_not_keep_another_from_going_on(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, max_trajectories=4)
    async with both(runs) as server, client_of(server) as learner, client_of(server) as sampler:
        await join_learner(learner, runs[0])
        await join_sampler(sampler, runs[0])
        permits = list((await sampler.admit(3, V0, 1.0)).permits)
        for permit in permits[:2]:
            await sampler.append(lambda sequence, permit=permit: frame_of(sampler.member, sequence, [permit], V0))  # type: ignore[misc]
        pushed_back = asyncio.create_task(
            sampler.append(lambda sequence: frame_of(sampler.member, sequence, permits[2:], V0))
        )
        await train(server, runs[1], 2)
        assert not pushed_back.done()
        async with client_of(server, run="a") as looker:
            assert "max_trajectories = 4 is reached" in (await looker.status()).limited_by
        assert isinstance(await learner.lease(1, 1.0), Lease)
        await asyncio.wait_for(pushed_back, 10.0)


async def test_a_stream_beyond_the_quota_waits_for_its_turn(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, max_streams=1)
    async with both(runs) as server, client_of(server) as learner:
        await join_learner(learner, runs[0])
        first, second = client_of(server), client_of(server)
        for number, client in enumerate((first, second)):
            await join_sampler(client, runs[0], f"s{number}")
        await produce(first, 1, V0)
        waiting = asyncio.create_task(produce(second, 1, V0))
        await train(server, runs[1], 1)
        assert not waiting.done()
        await first.close()
        assert await asyncio.wait_for(waiting, 10.0) == [1]
        await second.close()


async def test_both_runs_are_there_after_a_restart(tmp_path: Path) -> None:
    runs = runs_of(tmp_path)
    async with both(runs) as server:
        for run in runs:
            await train(server, run, 1)
    async with both(runs) as server:
        assert [tenant.reservoir.state.committed for tenant in server.tenants] == [1, 1]


def test_two_runs_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.name a is in two of the run files"):
        serve(make_run(tmp_path / "1", name="a"), make_run(tmp_path / "2", name="a"))
