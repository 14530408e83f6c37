"""The buffer's HTTP side: health, metrics and status. It reads; nothing can be changed through it."""

from __future__ import annotations

from aiohttp import web
from google.protobuf.json_format import MessageToJson

from forebay.buffer.errors import RunUnknown
from forebay.buffer.http_site import EXPOSITION, HttpSite
from forebay.buffer.metrics import BufferMetrics
from forebay.buffer.server import BufferServer
from forebay.buffer.status import status_of


class HttpServer:
    """Serves /healthz, /readyz, /metrics and /status on one address."""

    def __init__(self, server: BufferServer, address: str) -> None:
        self._server, self._metrics = server, BufferMetrics(server)
        self.ready = True
        own = {"/readyz": self._readiness, "/metrics": self._scrape, "/status": self._status}
        self._site = HttpSite(address, own)

    async def start(self) -> int:
        """Begin to answer; the port."""
        return await self._site.start()

    async def stop(self) -> None:
        """Hang up."""
        await self._site.stop()

    async def _readiness(self, request: web.Request) -> web.Response:
        ready = self.ready and not any(reservoir.failure.done() for reservoir in self._server.reservoirs)
        return web.Response(text="ready\n" if ready else "not serving\n", status=200 if ready else 503)

    async def _scrape(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers=EXPOSITION)

    async def _status(self, request: web.Request) -> web.Response:
        try:
            status = status_of(self._server.tenants[request.query.get("run", "")].reservoir)
        except RunUnknown as error:
            raise web.HTTPNotFound(text=f"{error}: ask for /status?run=NAME\n") from error
        text = MessageToJson(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        return web.Response(text=text, content_type="application/json")
