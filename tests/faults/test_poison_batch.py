"""A batch that kills every learner process which leases it: set aside after the configured number, training goes on."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from forebay.buffer.client import BufferClient
from forebay.buffer.conservation import imbalances
from forebay.config.models import RunFile
from forebay.wire.version import Version
from tests.buffer.support import join_learner, join_sampler, produce
from tests.buffer.test_service import listening_run, started

POISON = "1"  #: a group of the first batch
LEARNERS = 2
#: Leases, "trains" and commits steps until the run has all; a batch with the poisoned group kills it as a fault in
#: native code would, with no word to the buffer. Prints the step and the groups of each batch before it trains it.
_LEARNER = """
import os, signal, sys
from forebay.buffer.client import BlockingClient
from forebay.config.identity import run_json
from forebay.config.models import RunFile
run, poison = RunFile.model_validate_json(sys.argv[1]), int(sys.argv[2])
with BlockingClient(run.buffer.listen) as client:
    joined = client.join("learner", "learner", "", "", run_json(run))
    client.rewind(joined.checkpoint_step)
    for step in range(joined.checkpoint_step + 1, run.learner.steps + 1):
        lease = client.lease(step, 20.0)
        print(step, *lease.group_ids, flush=True)
        if poison in lease.group_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        client.commit(step, step, {}, lease.attempt)
"""


def learn(run: RunFile) -> tuple[int, list[list[int]]]:
    """One learner process from start to end: its exit status, and what it leased as [step, group, group]."""
    words = [sys.executable, "-c", _LEARNER, run.model_dump_json(), POISON]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=30)
    return done.returncode, [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


async def test_a_poisoned_batch(tmp_path: Path) -> None:
    """Row 31: real processes die of it, one after the other; then it is a dead letter, and the run gets to its end."""
    run = listening_run(tmp_path, steps=3, max_staleness=3, max_attempts=LEARNERS)
    with started(run):
        async with (
            BufferClient(run.buffer.listen, on_trouble=lambda line: None) as first,
            BufferClient(run.buffer.listen, on_trouble=lambda line: None) as sampler,
        ):
            await join_learner(first, run)
            await join_sampler(sampler, run)
            assert await produce(sampler, 6, Version(1, 0)) == list(range(6))
            for _ in range(LEARNERS):
                assert await asyncio.to_thread(learn, run) == (-signal.SIGKILL, [[1, 0, 1]])
            learning = asyncio.create_task(asyncio.to_thread(learn, run))
            while not (more := await produce(sampler, 2, Version(1, 0))):  # permits that the dead letters give back
                assert not learning.done()
            assert more == [6, 7]
            assert await learning == (0, [[1, 2, 3], [2, 4, 5], [3, 6, 7]])
            ledger = await first.ledger()
    states = {row.state: row.groups for row in ledger.rows if row.groups}
    assert states == {"produced": 8, "trained": 6, "dropped:dead_letter": 2}
    assert imbalances(ledger) == []
