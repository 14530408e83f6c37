"""What every gRPC call of the buffer has in common: options, and errors as status codes."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its core logs every GOAWAY to stderr; ours says what matters

import grpc

from forebay.buffer.errors import CallRefused, JournalDamaged, JournalFailed

log = logging.getLogger(__name__)

S = TypeVar("S")
Q = TypeVar("Q")
A = TypeVar("A")

MAX_MESSAGE_BYTES = (8 << 20) + (256 << 10)
#: Long polls are answered after this long at the latest, with what was waited for.
MAX_WAIT_S = 30.0
#: The status metadata key that tells a client which error to raise.
ERROR_KEY = "forebay-error"
_MAX_DETAIL = 3000

_SHARED_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.http2.bdp_probe", 1),
    ("grpc.http2.ping_timeout_ms", 10_000),  # of a probe's ping, behind which keepalive's waits: 60 s unless set
]
SERVER_OPTIONS = [
    *_SHARED_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
CLIENT_OPTIONS = [
    *_SHARED_OPTIONS,
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # in truth the least time that a connection gets to come about
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]

_CODES = {
    "unknown-member": grpc.StatusCode.NOT_FOUND,
    "chunk-gone": grpc.StatusCode.NOT_FOUND,
    "unknown-run": grpc.StatusCode.NOT_FOUND,
    "streams-used-up": grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def answering(
    handler: Callable[[S, Q, Any], Awaitable[A]],
) -> Callable[[S, Q, Any], Awaitable[A]]:
    """A unary handler whose errors become status codes."""

    @functools.wraps(handler)
    async def guarded(self: S, request: Q, context: Any) -> A:
        try:
            return await handler(self, request, context)
        except (CallRefused, JournalFailed, JournalDamaged, OSError) as error:
            await abort(context, error)
            raise

    return guarded


def streaming(
    handler: Callable[[S, Q, Any], AsyncIterator[A]],
) -> Callable[[S, Q, Any], AsyncIterator[A]]:
    """A streaming handler whose errors become status codes."""

    @functools.wraps(handler)
    async def guarded(self: S, request: Q, context: Any) -> AsyncIterator[A]:
        try:
            async for answer in handler(self, request, context):
                yield answer
        except (CallRefused, JournalFailed, JournalDamaged, OSError) as error:
            await abort(context, error)

    return guarded


async def abort(context: Any, error: Exception) -> None:
    """End the call with the status that stands for `error`."""
    if isinstance(error, CallRefused):
        code = _CODES.get(error.kind, grpc.StatusCode.FAILED_PRECONDITION)
        await context.abort(code, str(error)[:_MAX_DETAIL], ((ERROR_KEY, error.kind),))
    if isinstance(error, JournalDamaged):
        log.error("%s", error)  # the disk's owner must hear of it, not only the one who asked
        await context.abort(grpc.StatusCode.DATA_LOSS, str(error)[:_MAX_DETAIL])
    await context.abort(grpc.StatusCode.UNAVAILABLE, str(error)[:_MAX_DETAIL])


def wait_of(requested_s: float) -> float:
    """The long poll that is granted."""
    return min(max(requested_s, 0.0), MAX_WAIT_S)
