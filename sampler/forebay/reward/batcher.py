"""Texts of many callers in one forward pass: gathered, sorted by length, cut by tokens, judged in a thread."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from forebay.reward.scorer import Problem, Text
from forebay.wire.v1.reward_pb2 import ScoreError

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Is told of every batch."""

    def batch(self, texts: int, tokens: int, padded_tokens: int, seconds: float) -> None:
        """`padded_tokens` is what the model computed, `tokens` what of it was text."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Item:
    """A text whose caller waits."""

    text: Text
    judged: asyncio.Future[float | Problem] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """Judges what `judge` is asked, `tokens_per_batch` at a time. `run` must run beside."""

    def __init__(
        self,
        score: Callable[[Sequence[Text]], list[float]],
        observer: Observer,
        *,
        tokens_per_batch: int,
        gather_s: float,
    ) -> None:
        self._score, self._observer = score, observer
        self._tokens_per_batch, self._gather_s = tokens_per_batch, gather_s
        self._waiting: list[_Item] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")

    async def judge(self, texts: Sequence[Text]) -> list[float | Problem]:
        """One finite score or problem a text, in order. Cancelled, its texts are not judged any more."""
        items = [_Item(text=text) for text in texts]
        self._waiting += items
        self._arrived.set()
        return list(await asyncio.gather(*(item.judged for item in items)))

    async def run(self) -> None:
        """Judge for ever."""
        while True:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                await asyncio.sleep(self._gather_s)
            gathered, self._waiting = self._waiting, []
            for batch in cut(gathered, self._tokens_per_batch):
                await self._judge_batch([item for item in batch if not item.judged.done()])

    def close(self) -> None:
        """End the thread when it has done what it does."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _judge_batch(self, items: Sequence[_Item]) -> None:
        if not items:
            return  # whoever asked has gone
        loop, texts = asyncio.get_running_loop(), [item.text for item in items]
        began = loop.time()
        outcomes: Sequence[float | Problem]
        try:
            scores = await loop.run_in_executor(self._thread, self._score, texts)
            outcomes = [_finite(score) for score in scores]
        except Exception as error:  # whatever a model raises is told to those whose texts it concerns
            log.exception("a batch of %d texts", len(texts))
            outcomes = [Problem(kind=ScoreError.FAILED, message=f"{type(error).__name__}: {_first_line(error)}")]
            outcomes *= len(items)
        lengths = [len(text) for text in texts]
        self._observer.batch(len(texts), sum(lengths), len(texts) * max(lengths), loop.time() - began)
        for item, outcome in zip(items, outcomes, strict=True):
            if not item.judged.done():
                item.judged.set_result(outcome)


def cut(items: Sequence[_Item], tokens_per_batch: int) -> Iterator[list[_Item]]:
    """Batches of like lengths, the longest first; padded to its longest none has more tokens, or it is one text."""
    batch: list[_Item] = []
    for item in sorted(items, key=lambda item: len(item.text), reverse=True):
        if batch and (len(batch) + 1) * len(batch[0].text) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _finite(score: float) -> float | Problem:
    if math.isfinite(score):
        return score
    return Problem(kind=ScoreError.NOT_FINITE, message=f"the model's score is {score}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:500]
