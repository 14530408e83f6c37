"""A buffer without sockets: clients call the servicers of a reservoir directly, in the same event loop.

For tests and simulations. Statuses, deadlines, streams and cuts are as over gRPC, so `Link` sees no difference:

    async with in_process(open_reservoir(run)) as buffer, buffer.client() as client:
        await client.join(...)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from forebay.buffer.async_client import BufferClient
from forebay.buffer.in_process_call import Call, Exchange
from forebay.buffer.reservoir import Reservoir
from forebay.buffer.service_control import ControlService
from forebay.buffer.service_experience import ExperienceService, register
from forebay.buffer.service_weights import WeightsService
from forebay.buffer.tenants import Tenants
from forebay.wire.v1 import control_pb2_grpc, weights_pb2_grpc

ADDRESS = "in process"


class InProcessBuffer:
    """The servicers of one reservoir. `cut` breaks the line to all clients, `mend` restores it."""

    def __init__(self, reservoir: Reservoir) -> None:
        self.reservoir = reservoir
        tenants = Tenants([reservoir])
        self._methods = _Methods()
        register(ExperienceService(tenants), self._methods)
        weights_pb2_grpc.add_WeightsServicer_to_server(WeightsService(tenants), self._methods)  # type: ignore[no-untyped-call]
        control_pb2_grpc.add_ControlServicer_to_server(ControlService(tenants), self._methods)  # type: ignore[no-untyped-call]
        self._reachable = True
        self._running: dict[Exchange, InProcessChannel] = {}

    def channel(self) -> InProcessChannel:
        """What a generated stub takes for a grpc.aio channel."""
        return InProcessChannel(self)

    def client(self, **options: Any) -> BufferClient:
        """A client of its own; `options` as BufferClient takes them."""
        return BufferClient(ADDRESS, channel=self.channel(), **options)

    def cut(self) -> None:
        """End every call in progress, and refuse new ones."""
        self._reachable = False
        self.end_calls("the line was cut")

    def mend(self) -> None:
        """Take calls again."""
        self._reachable = True

    async def stop(self) -> None:
        """End all calls, write everything out. Raises JournalFailed."""
        self.reservoir.hang_up()
        tasks = [exchange.task for exchange in self._running if exchange.task is not None]
        self.cut()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self.reservoir.close)

    def end_calls(self, why: str, of: InProcessChannel | None = None) -> None:
        """End the calls in progress, all of them or those of one channel."""
        for exchange in [exchange for exchange, channel in self._running.items() if of in (None, channel)]:
            exchange.end(grpc.StatusCode.UNAVAILABLE if of is None else grpc.StatusCode.CANCELLED, why)

    def begin(
        self, path: str, channel: InProcessChannel, requests: Any, encode: Any, timeout_s: float | None
    ) -> Exchange:
        """Run the method at `path`; `requests` is one message, an async iterator of them, or None: they are written."""
        handler = self._methods.handlers[path]
        exchange = Exchange(handler, timeout_s, self._ended)
        if not self._reachable:
            exchange.end(grpc.StatusCode.UNAVAILABLE, "the line is cut")
            return exchange
        self._running[exchange] = channel
        exchange.start(_encoded(exchange, requests, encode))
        return exchange

    def _ended(self, exchange: Exchange) -> None:
        self._running.pop(exchange, None)


class InProcessChannel:
    """The part of grpc.aio.Channel that generated stubs and `Link` use."""

    def __init__(self, buffer: InProcessBuffer) -> None:
        self._buffer = buffer

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> Callable[..., Call]:
        """A function that starts the call `method`: of one request, of an async iterator of them, or of none yet."""

        def start(requests: Any = None, timeout: float | None = None) -> Call:
            exchange = self._buffer.begin(method, self, requests, request_serializer, timeout)
            return Call(exchange, request_serializer, response_deserializer)

        return start

    unary_stream = stream_unary = stream_stream = unary_unary

    async def close(self, grace: float | None = None) -> None:
        """End the calls of this channel."""
        self._buffer.end_calls("Channel closed.", of=self)


class _Methods:
    """Takes the place of a grpc server while the generated code registers servicers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """The same methods under another form."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Methods by name."""
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})


async def _encoded(exchange: Exchange, requests: Any, encode: Callable[[Any], bytes]) -> AsyncIterator[bytes]:
    """The requests as bytes, from wherever the client gives them."""
    if requests is None:
        while (written := await exchange.requests.get()) is not None:
            yield written
    elif hasattr(requests, "__aiter__"):
        async for request in requests:
            yield encode(request)
    else:
        yield encode(requests)


@asynccontextmanager
async def in_process(reservoir: Reservoir) -> AsyncIterator[InProcessBuffer]:
    """A buffer for the time of the body. Needs a running event loop, which its clients share."""
    buffer = InProcessBuffer(reservoir)
    try:
        yield buffer
    finally:
        await buffer.stop()
