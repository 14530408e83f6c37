"""The reward service over real gRPC and HTTP: scores, refusals, health, metrics, drain."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from forebay.health import HEALTH
from forebay.reward.calls import MAX_COMPLETIONS, MAX_REQUEST_BYTES, SERVICE
from forebay.reward.desk import MAX_IN_HAND
from forebay.reward.server import RewardServer, serving
from forebay.wire.v1 import reward_pb2, reward_pb2_grpc
from forebay.wire.v1.reward_pb2 import HealthCheckRequest, HealthCheckResponse, ScoreError
from tests.reward.support import DEADLINE_S, MAX_LETTERS, LetterScorer, request


class Caller:
    """Calls without forebay's own client, so that anything can be said."""

    def __init__(self, address: str) -> None:
        self.channel: Any = grpc.aio.insecure_channel(address)
        self._stub: Any = reward_pb2_grpc.RewardStub(self.channel)  # type: ignore[no-untyped-call]
        coding = (HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString)
        self._check = self.channel.unary_unary(f"/{HEALTH}/Check", *coding)
        self._watch = self.channel.unary_stream(f"/{HEALTH}/Watch", *coding)

    async def score(self, asked: reward_pb2.ScoreRequest) -> list[reward_pb2.Scored]:
        answer: reward_pb2.ScoreResponse = await self._stub.Score(asked, timeout=DEADLINE_S)
        return list(answer.scored)

    async def refused(self, asked: reward_pb2.ScoreRequest) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.score(asked)
        return caught.value.code(), caught.value.details() or ""

    async def health(self, service: str = "") -> int:
        answer: HealthCheckResponse = await self._check(HealthCheckRequest(service=service), timeout=DEADLINE_S)
        return answer.status

    def watch(self, service: str) -> Any:
        return self._watch(HealthCheckRequest(service=service))


@asynccontextmanager
async def caller(server: RewardServer) -> AsyncIterator[Caller]:
    made = Caller(server.address)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield made
    finally:
        await made.channel.close()


async def test_every_completion_gets_its_score_or_its_error_in_order() -> None:
    async with serving("letters", LetterScorer()) as server, caller(server) as call:
        asked = request("a", "?", "a!", "b" * (MAX_LETTERS + 1), prompt="a")
        asked.conversations.add(system="aa", prompt="a", completions=["", "aaa"])
        scored = await call.score(asked)
    outcomes = [one.score if one.WhichOneof("outcome") == "score" else one.error.kind for one in scored]
    # A pass fails as a whole: its texts may be tried again, the one that was too long was never in it.
    assert outcomes == [
        ScoreError.FAILED,
        ScoreError.FAILED,
        ScoreError.FAILED,
        ScoreError.TOO_LONG,
        *[ScoreError.FAILED] * 2,
    ]
    assert [one.tokens for one in scored] == [2, 2, 3, 0, 3, 6]
    assert scored[0].error.message == "ZeroDivisionError: out of letters"


async def test_scores_and_a_nan_that_is_none() -> None:
    async with serving("letters", LetterScorer()) as server, caller(server) as call:
        good, nan, none = await call.score(request("aba", "?", "xyz", prompt="a"))
    assert (good.score, none.score) == (3.0, 1.0)
    assert nan.WhichOneof("outcome") == "error"
    assert nan.error.kind == ScoreError.NOT_FINITE


async def test_another_models_name_is_refused() -> None:
    async with serving("letters", LetterScorer()) as server, caller(server) as call:
        code, told = await call.refused(request("a", model="digits"))
    assert code == grpc.StatusCode.NOT_FOUND
    assert told == "reward model 'digits' is not served here, but letters"


async def test_sizes_are_bounded() -> None:
    scorer = LetterScorer()
    async with serving("letters", scorer) as server, caller(server) as call:
        code, told = await call.refused(request(*["a"] * (MAX_COMPLETIONS + 1)))
        assert (code, told) == (grpc.StatusCode.INVALID_ARGUMENT, "513 completions in one call; expected at most 512")
        code, told = await call.refused(request("a" * (MAX_REQUEST_BYTES + 1)))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in told
        assert await call.score(request()) == []
        assert [one.error.kind for one in await call.score(request("a" * 500_000))] == [ScoreError.TOO_LONG]
        assert len(await call.score(request(*["a"] * MAX_COMPLETIONS))) == MAX_COMPLETIONS
    assert scorer.seen[0].completions == []  # what was refused was never read


async def test_when_its_hands_are_full_it_says_so_and_takes_what_comes_later() -> None:
    scorer = LetterScorer()
    async with serving("letters", scorer) as server, caller(server) as call:
        scorer.gate.clear()
        full = request(*["a"] * MAX_COMPLETIONS)
        filling = [asyncio.create_task(call.score(full)) for _ in range(MAX_IN_HAND // MAX_COMPLETIONS)]
        while len(scorer.seen) < len(filling):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # calls travel through a real socket
        code, told = await call.refused(request("a"))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert told == f"{MAX_IN_HAND} completions wait already: come again later"
        scorer.gate.set()
        assert {len(await one) for one in filling} == {MAX_COMPLETIONS}
        assert [one.score for one in await call.score(request("a"))] == [1.0]


async def test_health_by_every_name_before_while_and_after() -> None:
    server = RewardServer("letters", "127.0.0.1:0")
    await server.start()
    async with caller(server) as call:
        watch = call.watch(SERVICE)
        names = ("", SERVICE, "letters")
        assert [await call.health(name) for name in names] == [HealthCheckResponse.NOT_SERVING] * 3
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        code, told = await call.refused(request("a"))
        assert (code, told) == (grpc.StatusCode.UNAVAILABLE, "reward model letters is being loaded, or stops")
        await server.open(LetterScorer(), tokens_per_batch=100, gather_s=0.0)
        assert [await call.health(name) for name in names] == [HealthCheckResponse.SERVING] * 3
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="no 'digits' here, but"):
            await call.health("digits")
        await server.stop(DEADLINE_S)  # a watch does not hold it up
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        assert await watch.read() == grpc.aio.EOF


async def test_a_drain_finishes_what_is_in_hand_and_takes_no_more() -> None:
    scorer = LetterScorer()
    async with serving("letters", scorer) as server, caller(server) as call:
        scorer.gate.clear()
        running = asyncio.create_task(call.score(request("aaa")))
        await asyncio.to_thread(scorer.judging.wait, DEADLINE_S)
        stopping = asyncio.create_task(server.stop(DEADLINE_S))
        await asyncio.sleep(0)
        code, _ = await call.refused(request("a"))
        assert code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        assert not stopping.done()
        scorer.gate.set()
        assert [one.score for one in await running] == [3.0]
        await stopping


async def test_metrics_count_outcomes_and_padding_and_readiness_follows_health() -> None:
    async with serving("letters", LetterScorer(), http="127.0.0.1:0") as server, caller(server) as call:
        await call.score(request("aaaa", "a", "?", "b" * (MAX_LETTERS + 1)))
        await call.refused(request("a", model="digits"))
        site = f"http://127.0.0.1:{server.http_port}"
        assert await asyncio.to_thread(_get, f"{site}/readyz") == (200, "ready\n")
        assert await asyncio.to_thread(_get, f"{site}/healthz") == (200, "ok\n")
        _, text = await asyncio.to_thread(_get, f"{site}/metrics")
    for line in (
        'forebay_reward_completions_total{model="letters",outcome="scored"} 2.0',
        'forebay_reward_completions_total{model="letters",outcome="not_finite"} 1.0',
        'forebay_reward_completions_total{model="letters",outcome="too_long"} 1.0',
        'forebay_reward_calls_refused_total{model="letters"} 1.0',
        'forebay_reward_batches_total{model="letters"} 1.0',
        'forebay_reward_tokens_total{model="letters"} 6.0',
        'forebay_reward_padded_tokens_total{model="letters"} 12.0',
        'forebay_reward_waiting{model="letters"} 0.0',
        'forebay_reward_serving{model="letters"} 1.0',
        'forebay_reward_call_seconds_count{model="letters"} 1.0',
    ):
        assert line in text


def _get(url: str) -> tuple[int, str]:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        return answer.status, answer.read().decode()
