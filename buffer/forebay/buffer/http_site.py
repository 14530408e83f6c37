"""An HTTP address that only answers questions, and only to whoever asked for it by name."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from aiohttp.typedefs import Middleware

from forebay.buffer.ports import is_loopback, split

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Headers of metrics.
EXPOSITION = {"Content-Type": "text/plain; version=0.0.4"}


class HttpSite:
    """Serves /healthz, and GETs of other paths by their handlers."""

    def __init__(self, address: str, handlers: Mapping[str, Handler]) -> None:
        self._host, self._port = split(address)
        app = web.Application(middlewares=[_guard(self._host)], client_max_size=1 << 10)
        app.add_routes([web.get(path, handler) for path, handler in ({"/healthz": _health} | dict(handlers)).items()])
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> int:
        """Begin to answer; the port."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Hang up."""
        await self._runner.cleanup()


async def _health(request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


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
