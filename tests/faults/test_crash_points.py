"""The buffer dies at disk operation after disk operation of a run, and at no time breaks a promise.

Rows of the fault list: 1 to 5 and 9 to 11, with 6 (a write that dies half done) in every one of them.
"""

from __future__ import annotations

import random

import pytest

from tests.faults.crashing import FATES, crash_everywhere


@pytest.mark.parametrize("fate", FATES)
async def test_a_crash_at_every_disk_operation(fate: str) -> None:
    """Rows 1 to 6, 9 to 11: nothing acknowledged is lost, nothing is there twice, all is accounted for."""
    tally = await crash_everywhere(seed=1, fate=fate, every=4, rng=random.Random(fate))
    assert tally.points >= 30
    assert tally.failures == []
