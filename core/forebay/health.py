"""The standard gRPC health service (grpc.health.v1), which probes of Kubernetes and load balancers speak."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc

from forebay.wire.v1.reward_pb2 import HealthCheckRequest, HealthCheckResponse

HEALTH = "grpc.health.v1.Health"


class HealthService:
    """Says whether the process serves, by any of `names`. One event loop only."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._serving = self._closed = False
        self._changed = asyncio.Condition()

    @property
    def serving(self) -> bool:
        """What checks are answered."""
        return self._serving

    async def say(self, *, serving: bool, closing: bool = False) -> None:
        """From now on; `closing` also ends watches, which would hold up a drain."""
        async with self._changed:
            self._serving, self._closed = serving, closing
            self._changed.notify_all()

    @property
    def handler(self) -> Any:
        """For `add_generic_rpc_handlers`."""
        coding = {
            "request_deserializer": HealthCheckRequest.FromString,
            "response_serializer": HealthCheckResponse.SerializeToString,
        }
        calls = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **coding),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **coding),
        }
        return grpc.method_handlers_generic_handler(HEALTH, calls)

    async def _check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:
        if request.service not in self._names:
            told = ", ".join(sorted(self._names - {""}))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no {request.service[:100]!r} here, but {told}")
        return HealthCheckResponse(status=self._status(request.service))

    async def _watch(self, request: HealthCheckRequest, context: Any) -> AsyncIterator[HealthCheckResponse]:
        told: int | None = None
        while True:
            async with self._changed:
                while told == self._status(request.service) and not self._closed:
                    await self._changed.wait()
                if told == (status := self._status(request.service)):
                    return
            told = status
            yield HealthCheckResponse(status=status)

    def _status(self, name: str) -> HealthCheckResponse.ServingStatus.ValueType:
        if name not in self._names:
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if self._serving else HealthCheckResponse.NOT_SERVING
