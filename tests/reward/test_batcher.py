"""Texts of many callers share forward passes, within bounds, and fail one by one where they can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.reward.batcher import Batcher, cut
from forebay.reward.scorer import Problem, Text
from forebay.sampler.beside import end
from forebay.wire.v1.reward_pb2 import ScoreError
from tests.reward.support import DEADLINE_S, LetterScorer


class Seen:
    """What an observer is told."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, int]] = []

    def batch(self, texts: int, tokens: int, padded_tokens: int, seconds: float) -> None:
        assert seconds >= 0
        self.batches.append((texts, tokens, padded_tokens))


def text(letters: str) -> Text:
    return Text(ids=np.frombuffer(letters.encode(), np.uint8).astype(np.int64))


@asynccontextmanager
async def batching(
    scorer: LetterScorer, seen: Seen, *, tokens: int = 100, gather_s: float = 0.0
) -> AsyncIterator[Batcher]:
    batcher = Batcher(scorer.score, seen, tokens_per_batch=tokens, gather_s=gather_s)
    running = asyncio.create_task(batcher.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield batcher
    finally:
        scorer.gate.set()
        await end(running)
        batcher.close()


async def test_callers_that_come_while_the_model_works_share_the_next_pass() -> None:
    scorer, seen = LetterScorer(), Seen()
    async with batching(scorer, seen) as batcher:
        scorer.gate.clear()
        first = asyncio.create_task(batcher.judge([text("a")]))
        await asyncio.to_thread(scorer.judging.wait, DEADLINE_S)
        others = [asyncio.create_task(batcher.judge([text("aa"), text("b" * n)])) for n in (1, 5, 9)]
        await asyncio.sleep(0)  # they are all in the queue now
        scorer.gate.set()
        assert await first == [1.0]
        assert [await other for other in others] == [[2.0, 0.0]] * 3
    assert scorer.batches[0] == ["a"]
    assert [len(one) for one in scorer.batches[1]] == [9, 5, 2, 2, 2, 1]
    assert seen.batches == [(1, 1, 1), (6, 21, 54)]


async def test_an_idle_model_waits_a_moment_for_company() -> None:
    scorer = LetterScorer()
    async with batching(scorer, Seen(), gather_s=0.2) as batcher:
        first = asyncio.create_task(batcher.judge([text("a")]))
        await asyncio.sleep(0)
        second = asyncio.create_task(batcher.judge([text("aa")]))
        assert [await first, await second] == [[1.0], [2.0]]
    assert scorer.batches == [["aa", "a"]]


async def test_what_nobody_waits_for_any_more_is_not_judged() -> None:
    scorer = LetterScorer()
    async with batching(scorer, Seen()) as batcher:
        scorer.gate.clear()
        first = asyncio.create_task(batcher.judge([text("a")]))
        await asyncio.to_thread(scorer.judging.wait, DEADLINE_S)
        given_up = asyncio.create_task(batcher.judge([text("gone")]))
        patient = asyncio.create_task(batcher.judge([text("ab")]))
        await asyncio.sleep(0)
        given_up.cancel()
        await end(given_up)
        scorer.gate.set()
        assert [await first, await patient] == [[1.0], [1.0]]
    assert scorer.batches == [["a"], ["ab"]]


async def test_a_pass_that_fails_is_a_problem_of_its_texts_and_the_next_goes_on() -> None:
    scorer = LetterScorer()
    async with batching(scorer, Seen(), tokens=2) as batcher:
        failed, well = await batcher.judge([text("a!"), text("a")])
        assert failed == Problem(kind=ScoreError.FAILED, message="ZeroDivisionError: out of letters")
        assert well == 1.0
        assert await batcher.judge([text("a!")]) == [1.0]


async def test_a_score_that_is_no_number_is_a_problem_and_not_a_score() -> None:
    scorer = LetterScorer()
    async with batching(scorer, Seen()) as batcher:
        outcomes = await batcher.judge([text("a"), text("?")])
    assert outcomes[0] == 1.0
    assert outcomes[1] == Problem(kind=ScoreError.NOT_FINITE, message="the model's score is nan")


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 120))
def test_batches_hold_every_text_once_within_the_bound(lengths: Sequence[int], bound: int) -> None:
    class Item:
        def __init__(self, length: int) -> None:
            self.text = text("x" * length)

    items = [Item(length) for length in lengths]
    batches = list(cut(items, bound))  # type: ignore[arg-type]
    assert sorted(map(id, (item for batch in batches for item in batch))) == sorted(map(id, items))
    for batch in batches:
        longest = max(len(item.text) for item in batch)
        assert len(batch) == 1 or len(batch) * longest <= bound


@pytest.mark.parametrize("lengths", [[3, 3, 3, 3], [1, 1, 1, 9]])
def test_batches_are_as_full_as_the_bound_allows(lengths: list[int]) -> None:
    class Item:
        def __init__(self, length: int) -> None:
            self.text = text("x" * length)

    sizes = [len(batch) for batch in cut([Item(length) for length in lengths], 9)]  # type: ignore[misc]
    assert sizes == ([3, 1] if lengths[0] == 3 else [1, 3])
