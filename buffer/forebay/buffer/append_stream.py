"""One sampler's append stream: frames in as they come, answers out as the journal's progress allows.

An acknowledgement stands for every frame before it, so a group commit that made a hundred frames safe is one answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from forebay.buffer.errors import StreamsUsedUp
from forebay.buffer.intake import Answer, Intake, Received
from forebay.buffer.reservoir import Reservoir
from forebay.wire.v1 import experience_pb2

#: What one stream may have unanswered: at most, and at least, so that one frame always fits.
MAX_CREDIT_BYTES, MIN_CREDIT_BYTES = 16 << 20, 1 << 20
#: Checking runs at tens of GB/s: only above this a hop to a thread is cheaper than the time it takes.
_INLINE_CHECK_BYTES = 2 << 20
_ACKNOWLEDGED = (Answer.STORED, Answer.DUPLICATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """An answer, the LSN that must be safe before it may be given, and the bytes that it settles."""

    answer: Answer
    lsn: int
    payload_bytes: int


class AppendStream:
    """Answers one call. Iterate `answers` once."""

    def __init__(self, reservoir: Reservoir, intake: Intake, hello: experience_pb2.AppendRequest) -> None:
        """`hello` is the first message: it names the member and the level."""
        self._reservoir, self._intake, self._hello = reservoir, intake, hello
        self._member, self._level = hello.member, hello.level or experience_pb2.DURABLE
        self._taken: deque[_Taken] = deque()
        self._unanswered_bytes = 0
        self._over: Exception | None = None
        self._ended = False
        self._progress = asyncio.Event()
        self._drained = asyncio.Event()

    async def answers(self, requests: AsyncIterator[experience_pb2.AppendRequest]) -> AsyncIterator[Answer]:
        """Each answer once it is true; ends with the requests. Raises StreamsUsedUp and what the intake raises."""
        self._check_quota()
        reader = asyncio.create_task(self._take_all(requests))
        self._reservoir.streams += 1
        try:
            while await self._something_to_say():
                for answer in await self._settled():
                    yield answer
            if self._over is not None:
                raise self._over
        finally:
            self._reservoir.streams -= 1
            reader.cancel()

    async def _take_all(self, requests: AsyncIterator[experience_pb2.AppendRequest]) -> None:
        try:
            await self._take(self._hello)
            async for request in requests:
                await self._take(request)
        except Exception as error:
            self._over = error
        self._ended = True
        self._progress.set()

    async def _take(self, request: experience_pb2.AppendRequest) -> None:
        pause_s = 0.0
        for frame in await _received(request.frames):
            answer = self._intake.append(self._member, frame)
            size = len(frame.payload)
            self._taken.append(_Taken(answer=answer, lsn=self._reservoir.journal.last_lsn, payload_bytes=size))
            self._unanswered_bytes += size
            pause_s = max(pause_s, answer.retry_after_s)
        self._progress.set()
        if pause_s:  # a sender that does not wait as it is told would cost everybody else
            await asyncio.sleep(pause_s)
        while self._unanswered_bytes > MAX_CREDIT_BYTES:
            self._drained.clear()
            await self._drained.wait()

    async def _something_to_say(self) -> bool:
        while not self._taken and not self._ended:
            self._progress.clear()
            await self._progress.wait()
        return bool(self._taken)

    async def _settled(self) -> list[Answer]:
        """The oldest answer once it is true, and all that became true with it."""
        safe_lsn = await self._reservoir.progress.wait(self._taken[0].lsn, self._level)
        answers: list[Answer] = []
        while self._taken and self._taken[0].lsn <= safe_lsn:
            taken = self._taken.popleft()
            self._unanswered_bytes -= taken.payload_bytes
            if answers and taken.answer.outcome in _ACKNOWLEDGED and answers[-1].outcome in _ACKNOWLEDGED:
                answers.pop()
            answers.append(taken.answer)
        self._drained.set()
        answers[-1].level, answers[-1].lsn, answers[-1].credit_bytes = self._level, safe_lsn, self._credit_bytes()
        return answers

    def _check_quota(self) -> None:
        limit = self._reservoir.run.buffer.max_streams
        if self._reservoir.streams >= limit:
            raise StreamsUsedUp(f"[buffer] max_streams = {limit} append streams of this run are open")

    def _credit_bytes(self) -> int:
        """A fair share of the memory that is left for frames."""
        share = self._reservoir.memory_left_bytes // max(1, self._reservoir.streams)
        return min(MAX_CREDIT_BYTES, max(MIN_CREDIT_BYTES, share))


async def _received(frames: Sequence[experience_pb2.Frame]) -> list[Received]:
    """The frames, checked; large ones off the event loop."""
    if sum(frame.header.payload_bytes for frame in frames) > _INLINE_CHECK_BYTES:
        return await asyncio.to_thread(_receive_all, frames)
    return _receive_all(frames)


def _receive_all(frames: Sequence[experience_pb2.Frame]) -> list[Received]:
    return [Received.of(frame) for frame in frames]
