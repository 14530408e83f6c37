"""gRPC calls passed on as they are: any method, any number of messages either way, no message opened."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import grpc.aio


class Forwarder(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers `own` methods here and passes every other one on to `upstream`, statuses and metadata included."""

    def __init__(self, upstream: Any, own: Mapping[str, Any]) -> None:
        """`upstream` is a grpc.aio channel; `own` has method handlers by full name."""
        self._upstream, self._own = upstream, own

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call, by gRPC's own protocol."""
        method = handler_call_details.method
        if method in self._own:
            return self._own[method]

        async def passed_on(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for answer in self._forward(method, requests, context):
                yield answer

        return grpc.stream_stream_rpc_method_handler(passed_on)  # a unary call is a stream of one message each way

    async def _forward(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        call = self._upstream.stream_stream(method)(
            requests,
            timeout=context.time_remaining(),
            metadata=_passable(context.invocation_metadata()),
        )
        try:
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", _passable(error.trailing_metadata()))
        finally:
            call.cancel()


def _passable(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    """What callers set themselves, without gRPC's own."""
    return tuple((key, value) for key, value in metadata or () if not key.startswith(("grpc-", "user-agent", ":")))
