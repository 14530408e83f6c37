"""A pool of reward workers: a score that hangs or crashes costs its worker, never the sampler."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import TimeoutError as ScoreTimeout
from typing import Any

from pebble import ProcessExpired, ProcessPool

from forebay.config.models import TaskSection
from forebay.sampler.errors import RewardFailed
from forebay.sampler.rewards import worker
from forebay.sampler.tasks.task import Question, Score

_CLOSE_DEADLINE_S = 5.0
#: What takes long to import, by kind of task: imported once, before the workers are forked.
_LIBRARIES = {"reasoning-gym": ("reasoning_gym",), "jsonl": ("math_verify",)}


class RewardPool:
    """Scores replies in `workers` processes, each score within `timeout_s`."""

    def __init__(self, section: TaskSection, seed: int, *, workers: int) -> None:
        self._timeout_s = section.reward_timeout_s
        context = multiprocessing.get_context("forkserver")  # a rebuilt worker forks from a clean, small process
        context.set_forkserver_preload([worker.__name__, *_LIBRARIES.get(section.name.partition(":")[0], ())])
        self._pool: Any = ProcessPool(
            max_workers=workers, context=context, initializer=worker.begin, initargs=(section, seed)
        )

    async def score_group(self, question: Question, answers: Sequence[str]) -> list[Score | RewardFailed]:
        """One result an answer, in order; an answer that could not be scored has its error in its place.

        The whole group goes to a worker at once. If that fails, each answer gets its own call and its own time, so that
        one pathological reply does not take the others with it.
        """
        try:
            return list(await self._score(question, answers))
        except RewardFailed as error:
            if len(answers) == 1:
                return [error]
        results = await asyncio.gather(*(self._score(question, [one]) for one in answers), return_exceptions=True)
        return [_one(result) for result in results]

    async def _score(self, question: Question, answers: Sequence[str]) -> list[Score]:
        future = self._pool.schedule(worker.score, args=(question, list(answers)), timeout=self._timeout_s)
        try:
            scores: list[Score] = await asyncio.wrap_future(future)
        except ScoreTimeout as error:
            raise RewardFailed(f"the reward took longer than task.reward_timeout_s = {self._timeout_s:g}") from error
        except ProcessExpired as error:
            raise RewardFailed(f"the reward worker died: {error}") from error
        except Exception as error:
            raise RewardFailed(f"the reward raised {type(error).__name__}: {error}") from error
        for score in scores:
            if not all(map(math.isfinite, (score.reward, *score.parts.values()))):
                raise RewardFailed(f"the reward is not a finite number: {score}")
        return scores

    def close(self) -> None:
        """End the workers, whatever they do. Idempotent."""
        self._pool.stop()
        self._pool.join(_CLOSE_DEADLINE_S)


def _one(result: list[Score] | BaseException) -> Score | RewardFailed:
    if isinstance(result, list):
        return result[0]
    if isinstance(result, RewardFailed):
        return result
    raise result
