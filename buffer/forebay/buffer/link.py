"""One connection to a buffer: calls are tried again for as long as it cannot be reached."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from forebay.backoff import pause_after
from forebay.buffer.answers import Fenced, PlanOutdated, Refused, RunMismatch, Unreachable
from forebay.buffer.calls import CLIENT_OPTIONS, ERROR_KEY

log = logging.getLogger(__name__)

A = TypeVar("A")

_AGAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INTERNAL,  # "Internal error from Core": a stream begun on a connection that has just broken
    }
)
_ERRORS: dict[str, type[Refused] | type[RunMismatch]] = {
    "fenced": Fenced,
    "run-mismatch": RunMismatch,
    "chunk-gone": PlanOutdated,
}


#: Seconds without the buffer after which somebody in a hurry goes without it.
HURRIED_S = 10.0


class Link:
    """A channel and the patience to use it, which is endless until `in_a_hurry` says otherwise."""

    def __init__(
        self,
        address: str,
        *,
        channel: Any = None,
        clock: Callable[[], float] = time.monotonic,
        on_trouble: Callable[[str], None] | None = None,
        in_a_hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        self.address = address
        self.channel: Any = channel or grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        self._clock = clock
        self._on_trouble = on_trouble or log.warning
        self._in_a_hurry = in_a_hurry
        self._random = random.Random()
        self._trouble_since: float | None = None
        self._next_word_s = 1.0

    async def call(self, attempt: Callable[[], Awaitable[A]]) -> A:
        """What `attempt` answers, tried again while the buffer is unreachable. Raises Refused and its like, and
        Unreachable in a hurry."""
        tries = 0
        while True:
            try:
                answer = await attempt()
            except grpc.aio.AioRpcError as error:
                await self.pause_or_raise(error, tries)
                tries += 1
            else:
                self.reached()
                return answer

    def reached(self) -> None:
        """The buffer answered."""
        if self._trouble_since is not None and self._next_word_s > 1.0:
            self._on_trouble(f"buffer at {self.address} is back after {self._clock() - self._trouble_since:.0f} s")
        self._trouble_since, self._next_word_s = None, 1.0

    async def pause_or_raise(self, error: grpc.aio.AioRpcError, tries: int) -> None:
        """Wait before the next try, or raise what the status stands for when trying again is no use."""
        if error.code() not in _AGAIN:
            raise _as_refusal(error) from error
        lasted_s = self._say_trouble(error)
        if lasted_s >= HURRIED_S and self._in_a_hurry():
            raise Unreachable(f"buffer at {self.address} unreachable for {lasted_s:.0f} s") from error
        await asyncio.sleep(pause_after(tries, self._random))

    async def close(self) -> None:
        """Hang up."""
        await self.channel.close(None)

    def _say_trouble(self, error: grpc.aio.AioRpcError) -> float:
        """Now and then; returns how many seconds it has lasted."""
        now = self._clock()
        if self._trouble_since is None:
            self._trouble_since = now
        if now - self._trouble_since >= self._next_word_s:
            self._next_word_s = 2 * (now - self._trouble_since)
            self._on_trouble(
                f"buffer at {self.address} unreachable, trying again ({now - self._trouble_since:.0f} s): "
                f"{error.code().name.lower()}, {_first_line(error.details())}"
            )
        return now - self._trouble_since


def _as_refusal(error: grpc.aio.AioRpcError) -> Exception:
    kinds = [str(value) for key, value in error.trailing_metadata() or () if key == ERROR_KEY]
    kind = kinds[0] if kinds else ""
    message = error.details() or error.code().name
    return _ERRORS.get(kind, Refused)(message if kind else f"the buffer failed: {error.code().name}: {message}")


def _first_line(text: str | None) -> str:
    return (text or "no details").splitlines()[0][:200]
