"""The reward models of a run as a sampler sees them. Imports no torch."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

from forebay.backoff import pause_after
from forebay.config.models import RunFile
from forebay.errors import UsageError
from forebay.health import HEALTH
from forebay.reward.calls import CLIENT_OPTIONS, MAX_COMPLETIONS, MAX_REQUEST_BYTES
from forebay.reward.errors import RewardModelError, ScoreFailed
from forebay.wire.v1 import reward_pb2, reward_pb2_grpc
from forebay.wire.v1.reward_pb2 import HealthCheckRequest, HealthCheckResponse, ScoreError

A = TypeVar("A")

log = logging.getLogger(__name__)

#: Answers after which the same call may yet succeed.
_AGAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
#: What one request may hold besides completions and prompt: names, lengths, tags.
_ROOM_BYTES = 4 << 10


class _NotNow(RewardModelError):
    """The service answers, but has no score at this moment."""


class RewardModelClient:
    """One reward model's service. `tell` hears of a wait as it begins, in words for `forebay status`, and of its end.

    Its `_persist` is the one place where calls are tried again.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        timeout_s: float,
        patience_s: float,
        tell: Callable[[str], None] = lambda doing: None,
        dice: random.Random | None = None,
    ) -> None:
        self.name, self.address = name, address
        self._timeout_s, self._patience_s, self._tell = timeout_s, patience_s, tell
        self._dice = dice or random.Random()
        self._channel: Any = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        self._stub: Any = reward_pb2_grpc.RewardStub(self._channel)  # type: ignore[no-untyped-call]
        self._check: Any = self._channel.unary_unary(
            f"/{HEALTH}/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        self._answers = False  #: as the last call went
        self._trouble = ""

    async def score(self, system: str, prompt: str, completions: Sequence[str]) -> list[float]:
        """One finite score a completion, in order.

        Raises ScoreFailed when there is none after `patience_s`, or never will be.
        """
        scores: list[float] = []
        for part in _parts(self.name, reward_pb2.Conversation(system=system, prompt=prompt), completions):
            scores += await self._persist(self._scores_of, part, self._patience_s)
        return scores

    async def ready(self) -> None:
        """Return when the model can be asked, as far as is known; waits for ever, and says for what.

        Raises UsageError when what answers at the address is something else.
        """
        if self._answers:
            return
        try:
            await self._persist(self._check_health, HealthCheckRequest(service=self.name), None)
        except ScoreFailed as error:
            raise UsageError(f"reward.models.{self.name}.address: {error}") from error

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close(None)

    async def _persist(self, attempt: Callable[[A, float], Awaitable[Any]], asked: A, patience_s: float | None) -> Any:
        """What `attempt` returns, tried for `patience_s` (None: for ever). Raises ScoreFailed."""
        loop, tries = asyncio.get_running_loop(), 0
        began = loop.time()
        while True:
            left_s = self._timeout_s if patience_s is None else began + patience_s - loop.time()
            try:
                answer = await attempt(asked, min(self._timeout_s, max(left_s, 0.001)))
            except (grpc.aio.AioRpcError, _NotNow) as error:
                why = _understood(error)
                pause_s = pause_after(tries, self._dice)
                if isinstance(error, grpc.aio.AioRpcError) and error.code() not in _AGAIN:
                    raise ScoreFailed(f"reward model {self.name} at {self.address} refuses: {why}") from error
                self._in_trouble(why)
                if patience_s is not None and loop.time() + pause_s >= began + patience_s:
                    told = f"reward model {self.name} at {self.address} gave no score for {patience_s:g} s: {why}"
                    raise ScoreFailed(told) from error
                tries += 1
                await asyncio.sleep(pause_s)
            else:
                self._reached()
                return answer

    async def _scores_of(self, request: reward_pb2.ScoreRequest, timeout_s: float) -> list[float]:
        answer: reward_pb2.ScoreResponse = await self._stub.Score(request, timeout=timeout_s)
        count = sum(len(conversation.completions) for conversation in request.conversations)
        if len(answer.scored) != count:
            raise _NotNow(f"{len(answer.scored)} scores came for {count} replies")
        return [self._score_of(scored) for scored in answer.scored]

    def _score_of(self, scored: reward_pb2.Scored) -> float:
        if scored.WhichOneof("outcome") == "score":
            if not math.isfinite(scored.score):
                raise ScoreFailed(f"reward model {self.name} at {self.address} sent {scored.score} for a score")
            return scored.score
        if scored.error.kind in (ScoreError.TOO_LONG, ScoreError.NOT_FINITE):
            self._reached()
            raise ScoreFailed(f"reward model {self.name}: {scored.error.message}")
        raise _NotNow(scored.error.message or "an answer with neither score nor error")

    async def _check_health(self, request: HealthCheckRequest, timeout_s: float) -> None:
        answer: HealthCheckResponse = await self._check(request, timeout=timeout_s)
        if answer.status != HealthCheckResponse.SERVING:
            raise _NotNow("it is being loaded, or stops")

    def _in_trouble(self, why: str) -> None:
        self._answers = False
        self._tell(f"waiting: reward model {self.name} at {self.address} ({why})")
        if not self._trouble:
            log.warning("reward model %s at %s: %s; trying again", self.name, self.address, why)
        self._trouble = why

    def _reached(self) -> None:
        self._answers = True
        if self._trouble:
            self._trouble = ""
            log.info("reward model %s at %s answers", self.name, self.address)
            self._tell("generating")


class RewardModels:
    """All reward models of a run."""

    def __init__(self, run: RunFile, *, tell: Callable[[str], None] = lambda doing: None) -> None:
        self._task = run.task
        self._clients = [
            RewardModelClient(
                name, model.address, timeout_s=model.timeout_s, patience_s=run.reward.patience_s, tell=tell
            )
            for name, model in run.reward.models.items()
        ]

    async def __aenter__(self) -> RewardModels:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def ready(self) -> None:
        """Until every model can be asked. Raises UsageError when something else answers for one."""
        for client in self._clients:
            await client.ready()

    async def score(self, question: str, replies: Sequence[str]) -> Mapping[str, Sequence[float]]:
        """Each model's scores, one a reply, in order, by the model's name. Raises ScoreFailed."""
        prompt = self._task.prompt_template.replace("{prompt}", question)
        asked = [asyncio.ensure_future(each.score(self._task.system_prompt, prompt, replies)) for each in self._clients]
        try:
            scores = await asyncio.gather(*asked)
        finally:
            for one in asked:
                one.cancel()
        return {client.name: found for client, found in zip(self._clients, scores, strict=True)}

    async def close(self) -> None:
        """Hang up."""
        for client in self._clients:
            await client.close()


def _parts(
    model: str, conversation: reward_pb2.Conversation, completions: Sequence[str]
) -> Iterator[reward_pb2.ScoreRequest]:
    """Requests that the service takes. Raises ScoreFailed when one completion is too much for any."""
    alone = conversation.ByteSize() + _ROOM_BYTES
    part: list[str] = []
    size = alone
    for completion in completions:
        more = len(completion.encode()) + 8
        if alone + more > MAX_REQUEST_BYTES:
            raise ScoreFailed(f"reward model {model}: prompt and reply have {alone + more} bytes, a call 1 MiB at most")
        if part and (size + more > MAX_REQUEST_BYTES or len(part) == MAX_COMPLETIONS):
            yield _request(model, conversation, part)
            part, size = [], alone
        part.append(completion)
        size += more
    if part:
        yield _request(model, conversation, part)


def _request(model: str, conversation: reward_pb2.Conversation, completions: Sequence[str]) -> reward_pb2.ScoreRequest:
    asked = reward_pb2.Conversation(system=conversation.system, prompt=conversation.prompt, completions=completions)
    return reward_pb2.ScoreRequest(model=model, conversations=[asked])


def _understood(error: grpc.aio.AioRpcError | _NotNow) -> str:
    """In one line."""
    if isinstance(error, _NotNow):
        return str(error)
    details = ((error.details() or "").splitlines() or ["no details"])[0][:200]
    return f"{error.code().name.lower()}: {details}"
