"""The real buffer process, killed again and again under load; nothing acknowledged is lost, nothing is trained twice.

Not part of `make test`, which has three kills: `make prove`.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forebay.buffer.client import BufferClient, Lease
from forebay.buffer.conservation import imbalances, ledger_of
from forebay.config.models import RunFile
from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version
from tests.buffer.support import frame_of, join_learner, join_sampler
from tests.buffer.test_service import cancelled, groups_in, listening_run, started

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1800)]
V0 = Version(1, 0)
CYCLES = 20


@dataclass(slots=True)
class Load:
    """Two samplers that append and a learner that trains, as fast as the buffer lets them."""

    run: RunFile
    acknowledged: list[int] = field(default_factory=list)
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    wanted: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    async def after(self, more: int) -> None:
        """Return once `more` further frames are acknowledged."""
        self.wanted = len(self.acknowledged) + more
        self.reached.clear()
        await asyncio.wait_for(self.reached.wait(), 120)

    async def sample(self, name: str) -> None:
        async with BufferClient(self.run.buffer.listen, on_trouble=lambda line: None) as client:
            await join_sampler(client, self.run, name)
            while True:
                permits = list((await client.admit(40, V0, 5.0)).permits)
                await asyncio.gather(*(self._append(client, permit) for permit in permits))

    async def learn(self, learner: BufferClient) -> None:
        for step in range(1, 10_000):
            while not isinstance(lease := await learner.lease(step, 5.0), Lease):
                pass
            await learner.commit(step, step, {}, lease.attempt)
            self.trained[step] = lease.group_ids

    async def _append(self, client: BufferClient, permit: experience_pb2.Permit) -> None:
        await client.append(lambda sequence: frame_of(client.member, sequence, [permit], V0, filler=2000))
        self.acknowledged.append(permit.group_id)
        if len(self.acknowledged) >= self.wanted:
            self.reached.set()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_restarts_under_load(tmp_path: Path, how: signal.Signals) -> None:
    """Rows 1 to 4 by SIGKILL; rows 44 and 45, rolling restarts, by SIGTERM."""
    run, rng = listening_run(tmp_path, steps=20_000, max_staleness=15_000), random.Random(1)
    load, tasks = Load(run), list[asyncio.Task[None]]()
    async with BufferClient(run.buffer.listen, on_trouble=lambda line: None) as learner:
        for _ in range(CYCLES):
            with started(run) as process:
                if not tasks:
                    await join_learner(learner, run)
                    work = (load.sample("a"), load.sample("b"), load.learn(learner))
                    tasks = [asyncio.create_task(each) for each in work]
                await load.after(rng.randrange(30, 300))
                process.send_signal(how)
                code = await asyncio.to_thread(process.wait, 30)
                assert code == (0 if how == signal.SIGTERM else -signal.SIGKILL)
        with started(run):
            await load.after(100)
            await asyncio.gather(*map(cancelled, tasks))
            assert imbalances(await learner.ledger()) == []
    trained = [group for groups in load.trained.values() for group in groups]
    offline = ledger_of(run.run.home / "buffer" / "journal")
    counts = {"cycles": CYCLES, "frames": len(load.acknowledged), "steps": len(load.trained)}
    lost, twice = set(load.acknowledged) - groups_in(run), len(trained) - len(set(trained))
    print("\n" + json.dumps({"test": f"restarts_by_{how.name}", **counts, "lost": len(lost), "twice": twice}))
    assert (len(lost), twice) == (0, 0)
    assert sorted(load.trained) == list(range(1, len(load.trained) + 1)), "no step is skipped"
    assert len(load.acknowledged) == len(set(load.acknowledged))
    assert imbalances(offline) == []
