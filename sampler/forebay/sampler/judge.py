"""From replies to rewards: cut, extract, score, combine, and try again what failed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass

from forebay.config.models import RunFile
from forebay.config.reward_section import RULE, RewardSection
from forebay.reward.client import RewardModels
from forebay.reward.errors import ScoreFailed
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
    """Scores replies to a question: by the task's own rule within `attempts` tries, by reward models if there are some.

    With models the reward is rule_weight · rule + Σ weight · score, and all that went into it stands among its parts:
    what the rule says, as `rule`, and each model's score as `model.NAME`.
    """

    def __init__(
        self,
        pool: RewardPool,
        extractor: AnswerExtractor,
        *,
        attempts: int,
        models: RewardModels | None = None,
        reward: RewardSection | None = None,
    ) -> None:
        self._pool, self._extract, self._attempts = pool, extractor, attempts
        self._models, self._reward = models, reward or RewardSection()

    async def ready(self) -> None:
        """Until replies can be scored. Raises UsageError when an address of a reward model is wrong."""
        if self._models is not None:
            await self._models.ready()

    async def judge(self, question: Question, replies: Sequence[str]) -> list[Judged]:
        """The reward of each reply, in order. Raises RewardFailed when one has none: then none is of use."""
        return await _timed(self._rewards(question, replies))

    async def examine(self, question: Question, replies: Sequence[str]) -> list[Judged]:
        """What each held-out reply scores, in order, as `reward.heldout` says. Raises RewardFailed, as `judge`."""
        whole = self._reward.heldout == "reward"
        return await _timed((self._rewards if whole else self._rules)(question, replies))

    async def _rewards(self, question: Question, replies: Sequence[str]) -> list[Score]:
        if self._models is not None and self._reward.models:
            return await self._combined(question, replies, self._models)
        return [_weighed(rule, self._reward.rule_weight) for rule in await self._rules(question, replies)]

    async def _combined(self, question: Question, replies: Sequence[str], models: RewardModels) -> list[Score]:
        """Rule and models are asked at once; whichever fails ends the other."""
        ruling = asyncio.ensure_future(self._rules(question, replies)) if self._reward.rule_weight else None
        modelling = asyncio.ensure_future(models.score(question.text, replies))
        asked = [modelling, ruling] if ruling else [modelling]
        try:
            await asyncio.gather(*asked)
        except ScoreFailed as error:
            raise RewardFailed(str(error)) from error
        finally:
            for one in asked:
                one.cancel()
        by_model, rules = modelling.result(), ruling.result() if ruling else [None] * len(replies)
        return [
            combine(self._reward, rule, {name: scores[index] for name, scores in by_model.items()})
            for index, rule in enumerate(rules)
        ]

    async def _rules(self, question: Question, replies: Sequence[str]) -> list[Score]:
        answers = [self._extract(reply) for reply in replies]
        scores: dict[int, Score] = {}
        failure: RewardFailed | None = None
        for _ in range(self._attempts):
            open_ = [index for index in range(len(answers)) if index not in scores]
            results = await self._pool.score_group(question, [answers[index] for index in open_])
            scores |= {index: found for index, found in zip(open_, results, strict=True) if isinstance(found, Score)}
            failure = next((found for found in results if isinstance(found, RewardFailed)), None)
            if failure is None:
                return [scores[index] for index in range(len(answers))]
        raise failure or RewardFailed("no attempt was made")


def judge_of(run: RunFile, pool: RewardPool, models: RewardModels) -> Judge:
    """As the run file says."""
    extractor = AnswerExtractor(run.task.answer_pattern, run.sampler.stop)
    return Judge(pool, extractor, attempts=run.sampler.attempts, models=models, reward=run.reward)


def combine(reward: RewardSection, rule: Score | None, by_model: Mapping[str, float]) -> Score:
    """rule_weight · rule + Σ weight · score, with its parts; `rule` is None where it counts nothing.

    Raises RewardFailed when that is not a finite number.
    """
    terms = [reward.models[name].weight * score for name, score in by_model.items()]
    parts = {f"model.{name}": score for name, score in by_model.items()}
    if rule is not None:
        terms.append(reward.rule_weight * rule.reward)
        parts |= {**rule.parts, RULE: rule.reward}
    total = math.fsum(terms) if all(map(math.isfinite, terms)) else math.nan
    if not math.isfinite(total):
        raise RewardFailed(f"the weighted rewards do not add up to a finite number: {parts}")
    return Score(reward=total, parts=parts)


async def _timed(scoring: Awaitable[list[Score]]) -> list[Judged]:
    started = time.monotonic()
    scores = await scoring
    seconds = time.monotonic() - started
    return [Judged(score=score, seconds=seconds) for score in scores]


def _weighed(rule: Score, weight: float) -> Score:
    return rule if weight == 1 else Score(reward=weight * rule.reward, parts={**rule.parts, RULE: rule.reward})
