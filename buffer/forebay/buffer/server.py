"""The gRPC server over a reservoir, and the tasks that keep both going."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from forebay.buffer.calls import SERVER_OPTIONS
from forebay.buffer.reservoir import Reservoir
from forebay.buffer.service_control import ControlService
from forebay.buffer.service_experience import ExperienceService, register
from forebay.buffer.service_weights import WeightsService
from forebay.buffer.snapshotter import Snapshotter
from forebay.buffer.tenants import Tenant, Tenants
from forebay.wire.v1 import control_pb2_grpc, weights_pb2_grpc

log = logging.getLogger(__name__)


class BufferServer:
    """Serves the reservoirs of one or more runs on one address until stopped."""

    def __init__(self, reservoirs: Sequence[Reservoir], listen: str) -> None:
        self.tenants, self.reservoirs = Tenants(reservoirs), reservoirs
        self.loop_lag_s = 0.0
        self._server: Any = grpc.aio.server(options=SERVER_OPTIONS)
        register(ExperienceService(self.tenants), self._server)
        weights_pb2_grpc.add_WeightsServicer_to_server(WeightsService(self.tenants), self._server)  # type: ignore[no-untyped-call]
        control_pb2_grpc.add_ControlServicer_to_server(ControlService(self.tenants), self._server)  # type: ignore[no-untyped-call]
        host, _, port = listen.rpartition(":")
        self.port: int = self._server.add_insecure_port(listen)
        self.address = f"{host}:{self.port or port}"
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to answer."""
        await self._server.start()
        chores = [self._measure_lag()]
        for tenant in self.tenants:
            chores += [_sweep(tenant), Snapshotter(tenant.reservoir).run()]
        self._tasks = [asyncio.create_task(chore) for chore in chores]

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, give running ones `grace_s`, write everything out. Raises JournalFailed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for reservoir in self.reservoirs:
            reservoir.hang_up()
        await self._server.stop(grace_s)
        for reservoir in self.reservoirs:
            await asyncio.to_thread(reservoir.close)

    async def _measure_lag(self, every_s: float = 0.5) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(every_s)
            self.loop_lag_s = max(0.0, time.monotonic() - began - every_s)


async def _sweep(tenant: Tenant) -> None:
    """Notice who is lost and what is due."""
    while True:
        await asyncio.sleep(min(1.0, tenant.reservoir.members.timeout_s / 4))
        for member_id in tenant.roster.sweep():
            log.warning("sampler %s is lost: its groups are granted to others", member_id)
        tenant.reservoir.housekeep()


@asynccontextmanager
async def serving(
    *reservoirs: Reservoir, listen: str = "127.0.0.1:0", grace_s: float = 0.2
) -> AsyncIterator[BufferServer]:
    """A server for the time of the body; `address` says where."""
    server = BufferServer(reservoirs, listen)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s)
