"""Buffer and learner are killed and come back, again and again, at the level of the reservoir."""

from __future__ import annotations

from tests.faults.crashing import kill_and_resume


async def test_kills_of_buffer_and_learner_train_each_group_once() -> None:
    """Rows 28, 32 to 34: 30 cycles, each learner resumes from a checkpoint that the dice choose."""
    tally = await kill_and_resume(cycles=30, seed=3)
    assert tally.boots >= 15
    assert tally.learners >= 10
    assert tally.failures == []
