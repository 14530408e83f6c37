"""The sampler's end of the append stream: frames stay here until the buffer has acknowledged them.

Sequence numbers are given in the order of `append`. After a cut, a pushed-back frame or a gap, sending starts again at
the oldest frame that is not acknowledged; the buffer knows frames that it has. What is on the way is bounded by the
credit that the buffer grants, what is held by `max_bytes`: `append` waits meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from forebay.buffer.answers import ExperienceLost, FrameRefused
from forebay.buffer.link import Link
from forebay.wire.v1 import common_pb2, experience_pb2

#: Frames on the way at a time; below what the buffer remembers, so that every resent frame is recognised.
WINDOW_FRAMES = 512
#: The credit of a stream until the buffer has named one.
FIRST_CREDIT_BYTES = 4 << 20
#: Small frames travel together up to these: a whole window in one message would wait for the whole answer.
MESSAGE_BYTES, MESSAGE_FRAMES = 1 << 20, 64

FrameBuilder = Callable[[int], experience_pb2.Frame]
Response = experience_pb2.AppendResponse


@dataclass(slots=True)
class _Order:
    """A frame to be built, and who waits for it to be safe."""

    builder: FrameBuilder
    acknowledged: asyncio.Future[None]


@dataclass(slots=True)
class _Entry:
    sequence: int
    frame: experience_pb2.Frame
    payload_bytes: int
    acknowledged: asyncio.Future[None]


class Outbox:
    """Appends frames of one member, each exactly once."""

    def __init__(
        self,
        link: Link,
        stub: Any,
        member: common_pb2.Member,
        *,
        max_bytes: int = 64 << 20,
        level: experience_pb2.AckLevel.ValueType = experience_pb2.DURABLE,
    ) -> None:
        self._link, self._stub, self._max_bytes = link, stub, max_bytes
        self._hello = experience_pb2.AppendRequest(member=member, level=level)
        self._orders: deque[_Order] = deque()
        self._entries: deque[_Entry] = deque()
        self._next = 0
        self._bytes = 0
        self._credit_bytes = FIRST_CREDIT_BYTES
        self._ordered, self._room, self._to_send = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._over: Exception | None = None
        self.pause_s = 0.0  #: what the buffer last asked for when it was full; 0 when it took the last frame
        self.pushback = ""  #: why it was full

    async def append(self, frame_builder: FrameBuilder) -> None:
        """Return when the buffer's journal holds the frame that `frame_builder` makes of its sequence number.

        The builder runs in a thread. Raises FrameRefused, Fenced, and whatever the builder raises.
        """
        if self._over is not None:
            raise self._over
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._keep_building()), asyncio.create_task(self._keep_sending())]
        order = _Order(frame_builder, asyncio.get_running_loop().create_future())
        self._orders.append(order)
        self._ordered.set()
        await asyncio.shield(order.acknowledged)

    async def close(self) -> None:
        """Stop sending; what is not acknowledged is given up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- building

    async def _keep_building(self) -> None:
        while True:
            await _happened(self._ordered, lambda: bool(self._orders))
            await _happened(self._room, lambda: self._bytes < self._max_bytes)
            orders = [self._orders.popleft() for _ in range(min(len(self._orders), WINDOW_FRAMES))]
            await self._enter(orders)

    async def _enter(self, orders: list[_Order]) -> None:
        """Build what was ordered, as much as there is room for; one hop to a thread, however many small frames."""
        built = await asyncio.to_thread(_build, orders, self._next, self._max_bytes - self._bytes)
        for order, frame in built:
            problem = frame if isinstance(frame, Exception) else self._over
            if isinstance(frame, Exception) or problem is not None:
                _settle(order.acknowledged, problem)
                continue
            payload_bytes = frame.header.payload_bytes
            self._entries.append(_Entry(self._next, frame, payload_bytes, order.acknowledged))
            self._next += 1
            self._bytes += payload_bytes
        self._orders.extendleft(reversed(orders[len(built) :]))
        self._to_send.set()

    # --- sending

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
        await _happened(self._to_send, lambda: bool(self._entries))
        in_flight: deque[_Entry] = deque()
        call = self._stub.Append()
        reader = asyncio.create_task(self._read_answers(call, in_flight))
        try:
            await self._write_frames(call, in_flight, reader)
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError, ExperienceLost):
                await reader
            call.cancel()

    async def _write_frames(self, call: Any, in_flight: deque[_Entry], reader: asyncio.Task[None]) -> None:
        try:
            await call.write(self._hello)
            async for entries in self._messages(in_flight, reader):
                in_flight.extend(entries)
                await call.write(experience_pb2.AppendRequest(frames=[entry.frame for entry in entries]))
        except (asyncio.InvalidStateError, asyncio.CancelledError):
            if _is_cancelled():
                raise
            # the stream broke under the write: the reader knows how
        await reader

    async def _messages(self, in_flight: deque[_Entry], reader: asyncio.Task[None]) -> AsyncIterator[list[_Entry]]:
        """The frames of each next message, once the window has room for them; ends when the stream is over."""
        sent = self._entries[0].sequence - 1
        while not reader.done():
            found = self._sendable(sent, in_flight)
            if found:
                sent = found[-1].sequence
                yield found
            else:
                self._to_send.clear()
                await self._to_send.wait()

    def _sendable(self, sent: int, in_flight: deque[_Entry]) -> list[_Entry]:
        """Frames after `sent` that fit one message and the window."""
        begin = sent + 1 - self._entries[0].sequence if self._entries else 0
        room_bytes = self._credit_bytes - sum(entry.payload_bytes for entry in in_flight)
        found, size = list[_Entry](), 0
        most = min(MESSAGE_FRAMES, WINDOW_FRAMES - len(in_flight))
        for index in range(begin, min(len(self._entries), begin + most)):
            entry = self._entries[index]
            size += entry.payload_bytes
            if (in_flight or found) and (size > room_bytes or (found and size > MESSAGE_BYTES)):
                break
            found.append(entry)
        return found

    async def _read_answers(self, call: Any, in_flight: deque[_Entry]) -> None:
        """Settle frames as answers come, in order; return when sending has to begin again."""
        try:
            while True:
                answer = await call.read()
                if answer is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
                    return
                self._link.reached()
                if not await self._take(in_flight, answer):
                    return
        finally:
            call.cancel()
            self._to_send.set()

    async def _take(self, in_flight: deque[_Entry], answer: Response) -> bool:
        """Settle what the answer settles; whether the stream can go on."""
        self._credit_bytes = answer.credit_bytes or self._credit_bytes
        if answer.outcome in (Response.STORED, Response.DUPLICATE):
            self.pause_s, self.pushback = 0.0, ""
            while in_flight and in_flight[0].sequence <= answer.sequence:
                self._done(in_flight.popleft(), None)
        elif answer.outcome == Response.REFUSED:
            self._done(in_flight.popleft(), FrameRefused(answer.detail))
        elif answer.outcome == Response.FULL:
            self.pause_s, self.pushback = answer.retry_after_s, answer.detail
            await asyncio.sleep(answer.retry_after_s)
            return False
        else:
            self._check_not_lost(answer)
            return False
        self._room.set()
        self._to_send.set()
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
        self._bytes -= entry.payload_bytes
        _settle(entry.acknowledged, error)

    def _fail_all(self, error: Exception) -> None:
        self._over = error
        for entry in list(self._entries):
            self._done(entry, error)
        for order in self._orders:
            _settle(order.acknowledged, error)


def _build(
    orders: list[_Order], sequence: int, room_bytes: int
) -> list[tuple[_Order, experience_pb2.Frame | Exception]]:
    """Frames in order, numbered from `sequence`, until there is no room for another; one at least."""
    built: list[tuple[_Order, experience_pb2.Frame | Exception]] = []
    for order in orders:
        try:
            frame = order.builder(sequence)
        except Exception as error:
            built.append((order, error))
            continue
        built.append((order, frame))
        sequence, room_bytes = sequence + 1, room_bytes - frame.header.payload_bytes
        if room_bytes <= 0:
            break
    return built


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


async def _happened(event: asyncio.Event, condition: Callable[[], bool]) -> None:
    """Return once the condition holds; whoever may have made it true sets the event."""
    while not condition():
        event.clear()
        await event.wait()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
