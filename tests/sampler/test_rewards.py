"""Scores come from processes that can be killed: nothing a reward does stops the sampler."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from forebay.config.models import TaskSection
from forebay.sampler.beside import end
from forebay.sampler.errors import RewardFailed
from forebay.sampler.rewards.pool import RewardPool
from forebay.sampler.tasks import Question, Score

QUESTION = Question(text="ab1=")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    chosen = TaskSection(name="tests.sampler.letters:task", reward_timeout_s=1.0)
    opened = RewardPool(chosen, 0, workers=1)
    yield opened
    opened.close()


def rewards(results: list[Score | RewardFailed]) -> list[float | None]:
    return [None if isinstance(result, RewardFailed) else result.reward for result in results]


async def test_group_is_scored_in_order_with_named_parts(pool: RewardPool) -> None:
    results = await pool.score_group(QUESTION, ["12", "1x", "xy"])
    assert rewards(results) == [1.0, 0.5, 0.0]
    assert isinstance(results[1], Score)
    assert results[1].parts == {"digits": 0.5}


@pytest.mark.parametrize(
    ("trap", "message"),
    [
        ("hang", "longer than task.reward_timeout_s = 1"),
        ("crash", "worker died"),
        ("raise", "ZeroDivisionError: no letters"),
        ("nan", "not a finite number"),
    ],
)
async def test_one_bad_reply_fails_alone_and_the_pool_goes_on(pool: RewardPool, trap: str, message: str) -> None:
    results = await pool.score_group(QUESTION, ["12", trap, "xy"])
    assert rewards(results) == [1.0, None, 0.0]
    assert isinstance(results[1], RewardFailed)
    assert message in str(results[1])
    assert rewards(await pool.score_group(QUESTION, ["7"])) == [1.0]


async def test_workers_import_nothing_heavy(pool: RewardPool) -> None:
    assert rewards(await pool.score_group(QUESTION, ["heavy modules"])) == [0.0]


async def test_closing_kills_a_worker_that_hangs() -> None:
    chosen = TaskSection(name="tests.sampler.letters:task", reward_timeout_s=600.0)
    hanging = RewardPool(chosen, 0, workers=1)
    pid = await asyncio.wrap_future(hanging._pool.schedule(os.getpid))
    scoring = asyncio.create_task(hanging.score_group(QUESTION, ["hang"]))
    await asyncio.sleep(0)  # it is scheduled now
    await asyncio.to_thread(hanging.close)
    await end(scoring)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
