"""The buffer dies at disk operation after disk operation of a run, and at no time breaks a promise.

Rows of the fault list: 1 to 5 and 9 to 11, with 6 (a write that dies half done) in every one of them.
"""

from __future__ import annotations

import random

import pytest

from tests.faults.cast import Learner, Sampler
from tests.faults.crashing import FATES, crash_everywhere
from tests.faults.machine import PowerLost
from tests.faults.world import World


@pytest.mark.parametrize("fate", FATES)
async def test_a_crash_at_every_disk_operation(fate: str) -> None:
    """Rows 1 to 6, 9 to 11: nothing acknowledged is lost, nothing is there twice, all is accounted for."""
    tally = await crash_everywhere(seed=1, fate=fate, every=4, rng=random.Random(fate))
    assert tally.points >= 30
    assert tally.failures == []


async def test_what_a_killed_buffer_wrote_is_synced_before_it_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 2, 3, 5: killed between write and sync, the next process finds the frame; then the power goes."""
    world = World(1, [], steps=5)
    learner, sampler = Learner(world), Sampler(world, "s0")
    await learner.start()
    await sampler.start()
    await sampler.admit(2, learner.newest)
    sampler.produce(1)
    disk = world.disk

    def die(fd: int) -> None:
        disk.kill()
        raise PowerLost

    monkeypatch.setattr(disk, "sync", die)
    await sampler.deliver()
    assert world.boots == 2
    assert len(world.history.stored) == 2
    assert await world.verdict() == []
