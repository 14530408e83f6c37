"""A relay's HTTP side: health, and the bytes that its links carried."""

from __future__ import annotations

import time
from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from forebay.buffer.http import _guard
from forebay.buffer.ports import split
from forebay.buffer.relay_mirror import Mirror
from forebay.buffer.weight_traffic import traffic_family


class RelayHttp:
    """Serves /healthz, /readyz (when weights are here) and /metrics on one address."""

    def __init__(self, mirror: Mirror, run: str, address: str) -> None:
        self._mirror, self._run = mirror, run
        self._host, self._port = split(address)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        app = web.Application(middlewares=[_guard(self._host)], client_max_size=1 << 10)
        app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/readyz", self._readiness),
                web.get("/metrics", self._scrape),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> int:
        """Begin to answer; the port."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Hang up."""
        await self._runner.cleanup()

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at every scrape."""
        newest = self._mirror.newest()
        step = GaugeMetricFamily("forebay_weights_step", "Step of the newest version here", labels=("run",))
        if newest is not None:
            step.add_metric((self._run,), newest.version.step)
        yield step
        yield traffic_family({self._run: self._mirror.traffic})
        yield GaugeMetricFamily("forebay_buffer_disk_bytes", "Weights on disk", self._mirror.store.disk_bytes)
        yield GaugeMetricFamily("forebay_buffer_time_seconds", "The relay's clock", time.time())

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readiness(self, request: web.Request) -> web.Response:
        ready = self._mirror.newest() is not None
        return web.Response(text="ready\n" if ready else "no weights yet\n", status=200 if ready else 503)

    async def _scrape(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": "text/plain; version=0.0.4"})
