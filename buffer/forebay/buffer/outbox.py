"""The sampler's end of the append stream: frames stay here until the buffer has acknowledged them.

Sequence numbers are given in the order of `append`; at most a window of frames is on the way at a time. After a cut,
a pushed-back frame or a gap, sending starts again at the oldest frame that is not acknowledged; the buffer knows
frames that it has. Memory is bounded: `append` waits while the outbox holds `max_bytes`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from forebay.buffer.answers import ExperienceLost, FrameRefused
from forebay.buffer.link import Link
from forebay.wire.v1 import common_pb2, experience_pb2

log = logging.getLogger(__name__)

WINDOW = 8  #: frames on the way at a time, and more while they are small:
SMALL_WINDOW, SMALL_WINDOW_BYTES = 64, 1 << 20
Response = experience_pb2.AppendResponse


@dataclass(slots=True)
class _Entry:
    sequence: int
    frame: experience_pb2.Frame
    acknowledged: asyncio.Future[None]


class Outbox:
    """Appends frames of one member, each exactly once."""

    def __init__(self, link: Link, stub: Any, member: common_pb2.Member, *, max_bytes: int = 64 << 20) -> None:
        self._link, self._stub, self._member, self._max_bytes = link, stub, member, max_bytes
        self._entries: deque[_Entry] = deque()
        self._next = 0
        self._bytes = 0
        self._building = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._stream: asyncio.Task[None] | None = None
        self.pause_s = 0.0  #: what the buffer last asked for when it was full; 0 when it took the last frame
        self.pushback = ""  #: why it was full

    async def append(self, frame_builder: Callable[[int], experience_pb2.Frame]) -> None:
        """Return when the buffer's journal holds the frame that `frame_builder` makes of its sequence number.

        The builder runs in a thread. Raises FrameRefused, Fenced, and whatever the builder raises.
        """
        async with self._building:
            await self._wait_for(lambda: self._bytes < self._max_bytes)
            frame = await asyncio.to_thread(frame_builder, self._next)
            entry = _Entry(self._next, frame, asyncio.get_running_loop().create_future())
            self._next += 1
            self._entries.append(entry)
            self._bytes += frame.header.payload_bytes
        if self._stream is None or self._stream.done():
            self._stream = asyncio.create_task(self._keep_sending())
        await self._notify()
        await asyncio.shield(entry.acknowledged)

    async def close(self) -> None:
        """Stop sending; what is not acknowledged is given up."""
        if self._stream is not None:
            self._stream.cancel()
            await asyncio.gather(self._stream, return_exceptions=True)

    async def _keep_sending(self) -> None:
        tries = 0
        while True:
            try:
                await self._send_until_done()
                tries = 0
            except grpc.aio.AioRpcError as error:
                try:
                    await self._link.pause_or_raise(error, tries)
                except Exception as fatal:
                    return self._fail_all(fatal)
                tries += 1
            except ExperienceLost as error:
                return self._fail_all(error)

    async def _send_until_done(self) -> None:
        """One stream, until it breaks or must begin again."""
        call = self._stub.Append()
        await call.write(experience_pb2.AppendRequest(member=self._member))
        in_flight: deque[_Entry] = deque()
        reader = asyncio.create_task(self._read_answers(call, in_flight))
        try:
            await self._write_frames(call, in_flight, reader)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            call.cancel()

    async def _write_frames(self, call: Any, in_flight: deque[_Entry], reader: asyncio.Task[None]) -> None:
        sent = self._entries[0].sequence - 1 if self._entries else self._next - 1
        while True:
            entry = await self._next_to_send(sent, in_flight, reader)
            if entry is None:
                return await reader
            in_flight.append(entry)
            sent = entry.sequence
            try:
                await call.write(experience_pb2.AppendRequest(frame=entry.frame))
            except (asyncio.InvalidStateError, asyncio.CancelledError):
                if _is_cancelled():
                    raise
                return await reader  # the stream broke under the write: the reader knows how

    async def _next_to_send(self, sent: int, in_flight: deque[_Entry], reader: asyncio.Task[None]) -> _Entry | None:
        """The frame after `sent` once the window has room for it; None when the stream is over."""
        await self._wait_for(lambda: reader.done() or (_has_room(in_flight) and self._next > sent + 1))
        if reader.done():
            return None
        return self._entries[sent + 1 - self._entries[0].sequence]

    async def _read_answers(self, call: Any, in_flight: deque[_Entry]) -> None:
        """Settle frames as answers come, in order; return when sending has to begin again."""
        try:
            while True:
                answer = await call.read()
                if answer is grpc.aio.EOF:
                    return
                self._link.reached()
                if not await self._settle(in_flight, answer):
                    return
        finally:
            call.cancel()
            await self._notify()

    async def _settle(self, in_flight: deque[_Entry], answer: Response) -> bool:
        entry = in_flight.popleft()
        if answer.outcome in (Response.STORED, Response.DUPLICATE):
            self.pause_s, self.pushback = 0.0, ""
            self._done(entry, None)
        elif answer.outcome == Response.REFUSED:
            self._done(entry, FrameRefused(answer.detail))
        elif answer.outcome == Response.FULL:
            self.pause_s, self.pushback = answer.retry_after_s, answer.detail
            await asyncio.sleep(answer.retry_after_s)
            return False
        else:
            self._check_not_lost(answer)
            return False
        await self._notify()
        return True

    def _check_not_lost(self, answer: Response) -> None:
        oldest = self._entries[0].sequence if self._entries else self._next
        if answer.expected_sequence < oldest:
            raise ExperienceLost(
                f"the buffer at {self._link.address} expects frame {answer.expected_sequence}, but had acknowledged "
                f"all before {oldest}: its disk lost data; see its log"
            )

    def _done(self, entry: _Entry, error: Exception | None) -> None:
        self._entries.popleft()  # answers come in the order of sending, so it is the oldest
        self._bytes -= entry.frame.header.payload_bytes
        if entry.acknowledged.done():
            return
        if error is None:
            entry.acknowledged.set_result(None)
        else:
            entry.acknowledged.set_exception(error)

    def _fail_all(self, error: Exception) -> None:
        for entry in list(self._entries):
            self._done(entry, error)

    async def _wait_for(self, ready: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(ready)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _has_room(in_flight: deque[_Entry]) -> bool:
    if len(in_flight) < WINDOW:
        return True
    sent_bytes = sum(entry.frame.header.payload_bytes for entry in in_flight)
    return len(in_flight) < SMALL_WINDOW and sent_bytes < SMALL_WINDOW_BYTES


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
