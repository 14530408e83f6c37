"""The sampler's side of a reward model: patience, deadlines, words for who waits, and never a 0 for an error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from forebay.backoff import pause_after
from forebay.errors import UsageError
from forebay.reward.calls import MAX_COMPLETIONS
from forebay.reward.client import RewardModelClient
from forebay.reward.errors import ScoreFailed
from forebay.reward.server import serving
from forebay.wire.v1 import reward_pb2, reward_pb2_grpc
from tests.end_to_end.shells import free_ports
from tests.reward.support import DEADLINE_S, LetterScorer


@asynccontextmanager
async def client(address: str, told: list[str] | None = None, **settings: float) -> AsyncIterator[RewardModelClient]:
    chosen = {"timeout_s": 5.0, "patience_s": DEADLINE_S, **settings}
    hears = (lambda doing: None) if told is None else told.append
    made = RewardModelClient("letters", address, tell=hears, dice=random.Random(0), **chosen)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield made
    finally:
        await made.close()


@asynccontextmanager
async def liar(scored: reward_pb2.Scored, count: int = 1) -> AsyncIterator[str]:
    """A service that answers every call with the same, whatever is asked."""

    class Liar(reward_pb2_grpc.RewardServicer):
        async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
            return reward_pb2.ScoreResponse(scored=[scored] * count)

    server: Any = grpc.aio.server()
    reward_pb2_grpc.add_RewardServicer_to_server(Liar(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_scores_come_in_order_with_the_prompt_once() -> None:
    scorer = LetterScorer()
    async with serving("letters", scorer) as server, client(server.address) as asking:
        assert await asking.score("a", "ab", ["", "a", "ba"]) == [2.0, 3.0, 3.0]
    (conversation,) = scorer.seen
    assert (conversation.system, conversation.prompt, list(conversation.completions)) == ("a", "ab", ["", "a", "ba"])


async def test_what_is_too_much_for_one_call_takes_several() -> None:
    scorer = LetterScorer()
    async with serving("letters", scorer) as server, client(server.address) as asking:
        many = ["a" * (index % 7) for index in range(MAX_COMPLETIONS + 3)]
        assert await asking.score("", "", many) == [index % 7 for index in range(len(many))]
        long = ["a" * 400, *["ü" * 200_000] * 4]
        with pytest.raises(ScoreFailed, match="letters: 200000 letters"):
            await asking.score("", "", long)
        with pytest.raises(ScoreFailed, match="a call 1 MiB at most"):
            await asking.score("", "a" * 600_000, ["a" * 500_000])
    assert [len(one.completions) for one in scorer.seen] == [MAX_COMPLETIONS, 3, 3]


async def test_a_service_that_comes_late_is_waited_for_and_the_wait_is_told() -> None:
    (port,) = free_ports(1)
    address, told = f"127.0.0.1:{port}", list[str]()
    async with client(address, told) as asking:
        scoring, ready = (asyncio.create_task(work) for work in (asking.score("", "", ["aa"]), asking.ready()))
        while not told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert told[0].startswith(f"waiting: reward model letters at {address} (unavailable: ")
        async with serving("letters", LetterScorer(), listen=address):
            assert await scoring == [2.0]
            await ready
    assert told[-1] == "generating"


async def test_one_that_cannot_be_reached_is_an_error_after_the_patience() -> None:
    (port,) = free_ports(1)
    async with client(f"127.0.0.1:{port}", patience_s=0.5) as asking:
        with pytest.raises(ScoreFailed, match=rf"letters at 127.0.0.1:{port} gave no score for 0.5 s: unavailable: "):
            await asking.score("", "", ["a"])


async def test_an_answer_that_does_not_come_is_an_error_after_the_patience() -> None:
    scorer = LetterScorer()
    async with serving("letters", scorer) as server, client(server.address, timeout_s=0.1, patience_s=0.6) as asking:
        scorer.gate.clear()
        with pytest.raises(ScoreFailed, match=r"gave no score for 0.6 s: deadline_exceeded"):
            await asking.score("", "", ["a"])
        scorer.gate.set()
    assert len(scorer.seen) > 1  # it was asked again at the deadline of a call


async def test_a_pass_that_fails_is_tried_again() -> None:
    scorer, told = LetterScorer(), list[str]()
    async with serving("letters", scorer) as server, client(server.address, told) as asking:
        assert await asking.score("", "", ["a!", "aa"]) == [1.0, 2.0]
    assert told == [
        f"waiting: reward model letters at {server.address} (ZeroDivisionError: out of letters)",
        "generating",
    ]


@pytest.mark.parametrize(
    ("reply", "message"),
    [("?", "letters: the model's score is nan"), ("b" * 1001, "letters: 1001 letters")],
)
async def test_what_the_model_will_never_score_is_an_error_at_once(reply: str, message: str) -> None:
    scorer = LetterScorer()
    async with serving("letters", scorer) as server, client(server.address) as asking:
        with pytest.raises(ScoreFailed, match=message):
            await asking.score("", "", ["a", reply])
    assert len(scorer.seen) == 1


@pytest.mark.parametrize(
    ("scored", "count", "message"),
    [
        (reward_pb2.Scored(score=float("nan")), 1, "sent nan for a score"),
        (reward_pb2.Scored(score=float("-inf")), 1, "sent -inf for a score"),
        (reward_pb2.Scored(), 1, "an answer with neither score nor error"),
        (reward_pb2.Scored(score=1.0), 2, "2 scores came for 1 replies"),
        (reward_pb2.Scored(score=1.0), 0, "0 scores came for 1 replies"),
    ],
)
async def test_a_service_that_answers_nonsense_gives_no_score(
    scored: reward_pb2.Scored, count: int, message: str
) -> None:
    async with liar(scored, count) as address, client(address, patience_s=0.3) as asking:
        with pytest.raises(ScoreFailed, match=message):
            await asking.score("", "", ["a"])


async def test_another_model_at_the_address_is_told_at_once_and_before_anything_is_generated() -> None:
    async with serving("digits", LetterScorer()) as server, client(server.address) as asking:
        with pytest.raises(
            UsageError, match=r"reward\.models\.letters\.address: .* refuses: not_found: no 'letters' here"
        ):
            await asking.ready()
        with pytest.raises(ScoreFailed, match="refuses: not_found: reward model 'letters' is not served here"):
            await asking.score("", "", ["a"])


async def test_a_service_that_has_just_answered_is_not_asked_for_its_health() -> None:
    async with liar(reward_pb2.Scored(score=1.0)) as address, client(address) as asking:
        with pytest.raises(UsageError, match="refuses: unimplemented"):
            await asking.ready()
        assert await asking.score("", "", ["a"]) == [1.0]
        await asking.ready()


def test_pauses_grow_and_are_drawn_by_lot() -> None:
    dice = random.Random(0)
    for tries, longest_s in enumerate([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]):
        pauses = [pause_after(tries, dice) for _ in range(100)]
        assert longest_s / 2 <= min(pauses) < 0.6 * longest_s
        assert 0.9 * longest_s < max(pauses) <= longest_s
