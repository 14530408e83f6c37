"""A relay's HTTP side: health, and the bytes that its links carried."""

from __future__ import annotations

import time
from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from forebay.buffer.http_site import EXPOSITION, HttpSite
from forebay.buffer.relay_mirror import Mirror
from forebay.buffer.weight_traffic import traffic_family


class RelayHttp:
    """Serves /healthz, /readyz (when weights are here) and /metrics on one address."""

    def __init__(self, mirror: Mirror, run: str, address: str) -> None:
        self._mirror, self._run = mirror, run
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._site = HttpSite(address, {"/readyz": self._readiness, "/metrics": self._scrape})

    async def start(self) -> int:
        """Begin to answer; the port."""
        return await self._site.start()

    async def stop(self) -> None:
        """Hang up."""
        await self._site.stop()

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

    async def _readiness(self, request: web.Request) -> web.Response:
        ready = self._mirror.newest() is not None
        return web.Response(text="ready\n" if ready else "no weights yet\n", status=200 if ready else 503)

    async def _scrape(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers=EXPOSITION)
