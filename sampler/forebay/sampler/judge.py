"""From replies to rewards: cut, extract, score, and try again what failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.sampler.errors import RewardFailed
from forebay.sampler.rewards.pool import RewardPool
from forebay.sampler.tasks import Question, Score
from forebay.sampler.tasks.answers import AnswerExtractor


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A reply's score, and how long it took to come by."""

    score: Score
    seconds: float


class Judge:
    """Scores replies to a question, each within `attempts` tries."""

    def __init__(self, pool: RewardPool, extractor: AnswerExtractor, *, attempts: int) -> None:
        self._pool, self._extract, self._attempts = pool, extractor, attempts

    async def judge(self, question: Question, replies: Sequence[str]) -> list[Judged]:
        """One verdict a reply, in order. Raises RewardFailed when one could not be scored: then none is of use."""
        started = time.monotonic()
        answers = [self._extract(reply) for reply in replies]
        scores: dict[int, Score] = {}
        failure: RewardFailed | None = None
        for _ in range(self._attempts):
            open_ = [index for index in range(len(answers)) if index not in scores]
            results = await self._pool.score_group(question, [answers[index] for index in open_])
            scores |= {index: found for index, found in zip(open_, results, strict=True) if isinstance(found, Score)}
            failure = next((found for found in results if isinstance(found, RewardFailed)), None)
            if failure is None:
                seconds = time.monotonic() - started
                return [Judged(score=scores[index], seconds=seconds) for index in range(len(answers))]
        raise failure or RewardFailed("no attempt was made")
