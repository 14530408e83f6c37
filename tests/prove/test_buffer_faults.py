"""The buffer's faults at length: the same code as tests/faults, with more seeds, points and cycles.

Not part of `make test`: `make prove`. Each prints what it saw as one line of JSON.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest

from tests.faults.crashing import FATES, Tally, crash_everywhere, kill_and_resume

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1800)]


def show(name: str, **counts: object) -> None:
    """One line of JSON."""
    print("\n" + json.dumps({"test": name} | counts))


@pytest.mark.parametrize("fate", FATES)
async def test_every_crash_point(fate: str) -> None:
    """Rows 1 to 6, 9 to 11: every operation of three runs."""
    total = Tally()
    for seed in (1, 2, 3):
        tally = await crash_everywhere(seed=seed, fate=fate, every=1, rng=random.Random(seed))
        total.points, total.boots = total.points + tally.points, total.boots + tally.boots
        total.frames, total.commits = total.frames + tally.frames, total.commits + tally.commits
        total.failures += tally.failures
    show("every_crash_point", fate=fate, **asdict(total) | {"failures": len(total.failures)})
    assert total.points >= 200
    assert total.failures == []


async def test_two_hundred_kills() -> None:
    """Rows 28, 32 to 34."""
    tally = await kill_and_resume(cycles=250, seed=7)
    show("two_hundred_kills", **asdict(tally) | {"failures": len(tally.failures)})
    assert tally.boots + tally.learners >= 200
    assert tally.failures == []
