"""The buffer's HTTP side: health, metrics and status. It reads; nothing can be changed through it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware
from google.protobuf.json_format import MessageToJson

from forebay.buffer.errors import RunUnknown
from forebay.buffer.metrics import BufferMetrics
from forebay.buffer.ports import is_loopback, split
from forebay.buffer.server import BufferServer
from forebay.buffer.status import status_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves /healthz, /readyz, /metrics and /status on one address."""

    def __init__(self, server: BufferServer, address: str) -> None:
        self._server, self._metrics = server, BufferMetrics(server)
        self._host, self._port = split(address)
        self.ready = True
        app = web.Application(middlewares=[_guard(self._host)], client_max_size=1 << 10)
        app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/readyz", self._readiness),
                web.get("/metrics", self._scrape),
                web.get("/status", self._status),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> int:
        """Begin to answer; the port."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Hang up."""
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readiness(self, request: web.Request) -> web.Response:
        ready = self.ready and not any(reservoir.failure.done() for reservoir in self._server.reservoirs)
        return web.Response(text="ready\n" if ready else "not serving\n", status=200 if ready else 503)

    async def _scrape(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _status(self, request: web.Request) -> web.Response:
        try:
            status = status_of(self._server.tenants[request.query.get("run", "")].reservoir)
        except RunUnknown as error:
            raise web.HTTPNotFound(text=f"{error}: ask for /status?run=NAME\n") from error
        text = MessageToJson(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        return web.Response(text=text, content_type="application/json")


def _guard(host: str) -> Middleware:
    """Only GET and HEAD, and only under a name of this machine: a web page must not read it by DNS rebinding."""
    names = {"localhost", "127.0.0.1", "::1", host, socket.gethostname()}
    exposed = not is_loopback(host)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in {"GET", "HEAD"}:
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "HEAD"])
        name = _name_of(request.host)
        if name not in names and not (exposed and _is_ip(name)):
            raise web.HTTPForbidden(text=f"unknown Host {request.host[:100]!r}: ask for {host}\n")
        response = await handler(request)
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    return guard


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(host: str) -> str:
    return host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
