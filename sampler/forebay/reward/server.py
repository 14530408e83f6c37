"""The gRPC and HTTP servers of one reward model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from aiohttp import web

from forebay.buffer.http_site import EXPOSITION, HttpSite
from forebay.buffer.ports import split
from forebay.health import HealthService
from forebay.reward.batcher import Batcher
from forebay.reward.calls import SERVER_OPTIONS, SERVICE
from forebay.reward.desk import Desk
from forebay.reward.errors import CallRefused
from forebay.reward.metrics import RewardMetrics
from forebay.reward.scorer import Scorer
from forebay.wire.v1 import reward_pb2, reward_pb2_grpc

#: Calls at once at most: with the size of one, what callers can make this process hold.
MAX_CALLS = 256


class RewardServer(reward_pb2_grpc.RewardServicer):
    """Answers from the start, and with scores from `open` on."""

    def __init__(self, name: str, listen: str, http: str | None = None) -> None:
        self._name = name
        self._desk: Desk | None = None
        self._judging: asyncio.Task[None] | None = None
        self._health, self._metrics = HealthService(["", SERVICE, name]), RewardMetrics(name)
        self._server: Any = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((self._health.handler,))
        reward_pb2_grpc.add_RewardServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        host, _ = split(listen)
        self.port: int = self._server.add_insecure_port(listen)
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._site = HttpSite(http, {"/readyz": self._readiness, "/metrics": self._scrape}) if http else None
        self.http_port: int | None = None

    async def start(self) -> None:
        """Begin to answer; calls are told to come again until `open`."""
        await self._server.start()
        if self._site is not None:
            self.http_port = await self._site.start()

    async def open(self, scorer: Scorer, *, tokens_per_batch: int, gather_s: float) -> None:
        """Take calls."""
        batcher = Batcher(scorer.score, self._metrics, tokens_per_batch=tokens_per_batch, gather_s=gather_s)
        self._judging = asyncio.create_task(batcher.run())
        self._desk = Desk(scorer, batcher, self._metrics)
        await self._say(serving=True)

    async def failed(self) -> None:
        """Until nothing can be judged any more; raises why. Only once `open`."""
        assert self._judging is not None
        await self._judging

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, give running ones `grace_s`, hang up."""
        await self._say(serving=False, closing=True)
        await self._server.stop(grace_s)
        if self._judging is not None and self._desk is not None:
            self._judging.cancel()
            await asyncio.gather(self._judging, return_exceptions=True)
            self._desk.close()
        if self._site is not None:
            await self._site.stop()

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        """Scores, or why not."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            answer = await self._desk_for(request).score(request)
        except CallRefused as error:
            self._metrics.refused()
            await context.abort(error.code, str(error))
            raise
        self._metrics.answered(loop.time() - began)
        return answer

    def _desk_for(self, request: reward_pb2.ScoreRequest) -> Desk:
        if request.model != self._name:
            raise CallRefused(
                grpc.StatusCode.NOT_FOUND, f"reward model {request.model[:100]!r} is not served here, but {self._name}"
            )
        if self._desk is None or not self._health.serving:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, f"reward model {self._name} is being loaded, or stops")
        return self._desk

    async def _say(self, *, serving: bool, closing: bool = False) -> None:
        self._metrics.serving(serving)
        await self._health.say(serving=serving, closing=closing)

    async def _readiness(self, request: web.Request) -> web.Response:
        ready = self._health.serving
        return web.Response(text="ready\n" if ready else "not serving\n", status=200 if ready else 503)

    async def _scrape(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers=EXPOSITION)


@asynccontextmanager
async def serving(
    name: str,
    scorer: Scorer,
    *,
    listen: str = "127.0.0.1:0",
    http: str | None = None,
    tokens_per_batch: int = 16_384,
    gather_s: float = 0.005,
    grace_s: float = 0.2,
) -> AsyncIterator[RewardServer]:
    """A server for the time of the body; `address` says where."""
    server = RewardServer(name, listen, http)
    await server.start()
    try:
        await server.open(scorer, tokens_per_batch=tokens_per_batch, gather_s=gather_s)
        yield server
    finally:
        await server.stop(grace_s)
