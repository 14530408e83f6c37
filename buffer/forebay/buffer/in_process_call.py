"""One call between a client and a servicer of the same event loop, with what gRPC's asyncio calls do for forebay.

Messages are serialized, as on a wire, so that neither side holds the other's objects. The servicer runs in a task of
its own; streams hold a window of messages in each direction, and whoever is ahead waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio

from forebay.buffer.calls import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

_WINDOW = 16
#: What `read` answers at the end of a stream.
EOF = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    metadata: Metadata = ()


class Aborted(Exception):
    """A servicer ended its call with a status."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.details)
        self.status = status


class Context:
    """What a servicer may do with its call."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call."""
        raise Aborted(Status(code=code, details=details, metadata=trailing_metadata))


class Pipe:
    """Messages in one direction: one writer, one reader, a bounded number on the way."""

    def __init__(self) -> None:
        self._items: deque[bytes] = deque()
        self._closed = False
        self._news, self._room = asyncio.Event(), asyncio.Event()

    async def put(self, item: bytes) -> bool:
        """Wait for room; False when the pipe is closed."""
        while len(self._items) >= _WINDOW and not self._closed:
            self._room.clear()
            await self._room.wait()
        if not self._closed:
            self._items.append(item)
            self._news.set()
        return not self._closed

    async def get(self) -> bytes | None:
        """The next message; None when the pipe is closed and empty."""
        while not self._items and not self._closed:
            self._news.clear()
            await self._news.wait()
        self._room.set()
        return self._items.popleft() if self._items else None

    def close(self) -> None:
        """Nothing more goes in; what is in can be read."""
        self._closed = True
        self._news.set()
        self._room.set()


class Exchange:
    """The servicer's end of one call, and its status."""

    def __init__(self, handler: Any, timeout_s: float | None, on_end: Callable[[Exchange], None]) -> None:
        self._handler, self._timeout_s, self._on_end = handler, timeout_s, on_end
        self.requests, self.responses = Pipe(), Pipe()
        self.status: Status | None = None
        self._loop = asyncio.get_running_loop()
        self.task: asyncio.Task[None] | None = None

    def start(self, requests: AsyncIterator[bytes]) -> None:
        """Run the servicer on `requests`."""
        self.task = self._loop.create_task(self._serve(requests))

    def end(self, code: grpc.StatusCode, details: str = "", metadata: Metadata = ()) -> None:
        """Set the status, if the call has none yet, and stop the servicer."""
        if self.status is not None or self._loop.is_closed():
            return
        self.status = Status(code=code, details=details, metadata=metadata)
        self.requests.close()
        self.responses.close()
        self._on_end(self)
        if self.task is not None and self.task is not _current_task():
            self.task.cancel()

    async def _serve(self, requests: AsyncIterator[bytes]) -> None:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                await self._answer(self._decoded(requests))
            self.end(grpc.StatusCode.OK)
        except Aborted as error:
            self.end(error.status.code, error.status.details, error.status.metadata)
        except asyncio.CancelledError:
            self.end(grpc.StatusCode.CANCELLED, "cancelled")
            raise
        except Exception as error:
            if deadline.expired():
                self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            else:
                log.exception("a servicer failed")
                self.end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")

    async def _answer(self, requests: AsyncIterator[Any]) -> None:
        handler, context = self._handler, Context()
        given = requests if handler.request_streaming else await anext(requests)
        if handler.response_streaming:
            method = handler.stream_stream if handler.request_streaming else handler.unary_stream
            async for response in method(given, context):
                await self._send(response)
        else:
            method = handler.stream_unary if handler.request_streaming else handler.unary_unary
            await self._send(await method(given, context))

    async def _decoded(self, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for request in requests:
            _check_size(request)
            yield self._handler.request_deserializer(request)

    async def _send(self, response: Any) -> None:
        content = self._handler.response_serializer(response)
        _check_size(content)
        await self.responses.put(content)


class Call:
    """The client's end of one call: await it, iterate over it, or write and read."""

    def __init__(self, exchange: Exchange, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> None:
        self._exchange, self._encode, self._decode = exchange, encode, decode
        self._cancelled = self._began = False

    def __del__(self) -> None:
        self._exchange.end(grpc.StatusCode.CANCELLED, "nobody holds the call any more")

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only_response().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not EOF:
            yield response

    async def read(self) -> Any:
        """The next response, or EOF. Raises AioRpcError, and CancelledError once the call is cancelled."""
        content = None if self._cancelled else await self._or_cancel(self._exchange.responses.get())
        if content is not None:
            return self._decode(content)
        self._raise_for_status()
        return EOF

    async def write(self, request: Any) -> None:
        """Send a request. Raises InvalidStateError when the call is over, AioRpcError when it never began."""
        sent = await self._or_cancel(self._exchange.requests.put(self._encode(request)))
        if not sent and not self._began:
            self._raise_for_status()
        if not sent:
            raise asyncio.InvalidStateError("the call is over")
        self._began = True

    async def done_writing(self) -> None:
        """No request will follow."""
        self._exchange.requests.close()

    def cancel(self) -> None:
        """End the call."""
        if self._exchange.status is None:
            self._cancelled = True
            self._exchange.end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")

    async def _only_response(self) -> Any:
        response = await self.read()
        await self.read()  # the status comes last, and counts
        return response

    async def _or_cancel(self, waiting: Awaitable[Any]) -> Any:
        try:
            return await waiting
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _raise_for_status(self) -> None:
        status = self._exchange.status
        assert status is not None
        if self._cancelled:
            raise asyncio.CancelledError
        if status.code is not grpc.StatusCode.OK:
            trailing = grpc.aio.Metadata(*status.metadata)
            raise grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, details=status.details)


def _check_size(content: bytes) -> None:
    if len(content) > MAX_MESSAGE_BYTES:
        details = f"a message of {len(content)} bytes, at most {MAX_MESSAGE_BYTES}"
        raise Aborted(Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED, details=details))


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # the garbage collector runs outside of the loop, too
        return None
