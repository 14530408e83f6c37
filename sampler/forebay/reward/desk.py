"""Where calls are taken: bounded, turned into tokens, judged, answered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from forebay.reward.batcher import Batcher
from forebay.reward.calls import MAX_COMPLETIONS
from forebay.reward.errors import CallRefused
from forebay.reward.metrics import RewardMetrics
from forebay.reward.scorer import Problem, Scorer, Text
from forebay.wire.v1 import reward_pb2

#: Completions in hand at most: beyond, callers are asked to come again.
MAX_IN_HAND = 4096


class Desk:
    """Answers calls with the help of one scorer. One event loop only."""

    def __init__(self, scorer: Scorer, batcher: Batcher, metrics: RewardMetrics) -> None:
        self._scorer, self._batcher, self._metrics = scorer, batcher, metrics
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="reward-tokens")  # tokenizers are not for two threads
        self._in_hand = 0

    async def score(self, request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        """One outcome a completion, in order. Raises CallRefused."""
        count = sum(len(conversation.completions) for conversation in request.conversations)
        with self._taken(count):
            texts = await asyncio.get_running_loop().run_in_executor(self._encoding, self._encode, request)
            outcomes = await self._judge(texts)
        for outcome in outcomes:
            self._metrics.judged(outcome)
        return reward_pb2.ScoreResponse(
            scored=[_scored(text, outcome) for text, outcome in zip(texts, outcomes, strict=True)]
        )

    def close(self) -> None:
        """End the threads when they have done what they do."""
        self._batcher.close()
        self._encoding.shutdown(wait=False, cancel_futures=True)

    def _encode(self, request: reward_pb2.ScoreRequest) -> list[Text | Problem]:
        return [text for conversation in request.conversations for text in self._scorer.encode(conversation)]

    async def _judge(self, texts: Sequence[Text | Problem]) -> list[float | Problem]:
        judged = iter(await self._batcher.judge([text for text in texts if isinstance(text, Text)]))
        return [text if isinstance(text, Problem) else next(judged) for text in texts]

    @contextmanager
    def _taken(self, count: int) -> Iterator[None]:
        if count > MAX_COMPLETIONS:
            raise CallRefused(
                grpc.StatusCode.INVALID_ARGUMENT, f"{count} completions in one call; expected at most {MAX_COMPLETIONS}"
            )
        if self._in_hand + count > MAX_IN_HAND:
            raise CallRefused(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._in_hand} completions wait already: come again later"
            )
        self._count(count)
        try:
            yield
        finally:
            self._count(-count)

    def _count(self, change: int) -> None:
        self._in_hand += change
        self._metrics.waiting(self._in_hand)


def _scored(text: Text | Problem, outcome: float | Problem) -> reward_pb2.Scored:
    tokens = len(text) if isinstance(text, Text) else 0
    if isinstance(outcome, Problem):
        return reward_pb2.Scored(error=reward_pb2.ScoreError(kind=outcome.kind, message=outcome.message), tokens=tokens)
    return reward_pb2.Scored(score=outcome, tokens=tokens)
