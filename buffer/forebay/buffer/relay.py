"""`forebay buffer --upstream`: a relay in front of a site's samplers. Weights are mirrored; all else is passed on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from forebay.buffer.calls import CLIENT_OPTIONS, SERVER_OPTIONS
from forebay.buffer.client import BufferClient, Fenced, Refused
from forebay.buffer.ports import check_listen
from forebay.buffer.relay_forward import Forwarder
from forebay.buffer.relay_http import RelayHttp
from forebay.buffer.relay_mirror import Mirror
from forebay.buffer.run_folder import locked
from forebay.buffer.service_weights import WeightReading
from forebay.buffer.weight_store import WeightStore
from forebay.config.identity import run_json
from forebay.config.models import RunFile
from forebay.errors import EXIT_DONE, EXIT_FAILED
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version

log = logging.getLogger(__name__)

_SERVICE = "/forebay.wire.v1.Weights/"
_GRACE_S = 2.0


class Relay:
    """One run's relay: a server for the site, a client of the upstream."""

    def __init__(self, run: RunFile, upstream: str, store: WeightStore, *, listen: str, name: str) -> None:
        """`name` tells this relay from others at its upstream; the same after a restart."""
        self._run, self._name = run, name
        self._client = BufferClient(upstream)
        self.mirror = Mirror(self._client, store, run.publish.skip_deltas)
        self._passing: Any = grpc.aio.insecure_channel(upstream, options=CLIENT_OPTIONS)
        self._server: Any = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((Forwarder(self._passing, _own_calls(self.mirror)),))
        self.port: int = self._server.add_insecure_port(listen)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve what is here already, and keep up with the upstream. Raises RunMismatch at `failed`."""
        await self._server.start()
        self._tasks = [asyncio.create_task(self._take_part())]

    async def failed(self) -> None:
        """Wait for what cannot be mended: another relay of this name, a run with other settings. Raises it."""
        await asyncio.gather(*self._tasks)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, give running ones `grace_s`, hang up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.mirror.close()
        await self._server.stop(grace_s)
        await self._passing.close(None)
        await self._client.close()

    async def _take_part(self) -> None:
        joined = await self._client.join("edge", self._name, "", self._run.sampler.region, run_json(self._run))
        duties = [asyncio.create_task(self.mirror.follow()), asyncio.create_task(self._beat(joined.heartbeat_s))]
        try:
            done, _ = await asyncio.wait(duties, return_when=asyncio.FIRST_COMPLETED)
            for duty in done:
                duty.result()
        finally:
            for duty in duties:
                duty.cancel()

    async def _beat(self, every_s: float) -> None:
        while True:
            newest = self.mirror.newest()
            version, digest = (Version.from_proto(newest.version), newest.digest) if newest else (None, b"")
            try:
                await self._client.heartbeat("relaying weights", 0.0, version, digest, {})
            except Fenced:
                raise
            except Refused as error:
                log.warning("joining the upstream again: %s", error)
                await self._client.join("edge", self._name, "", self._run.sampler.region, run_json(self._run))
            await asyncio.sleep(every_s)


def _own_calls(mirror: Mirror) -> dict[str, Any]:
    """The calls that the relay answers by itself."""
    reading = WeightReading(lambda request: mirror)
    return {
        f"{_SERVICE}Watch": grpc.unary_stream_rpc_method_handler(
            reading.Watch,
            request_deserializer=weights_pb2.WatchRequest.FromString,
            response_serializer=weights_pb2.Announcement.SerializeToString,
        ),
        f"{_SERVICE}Plan": grpc.unary_unary_rpc_method_handler(
            reading.Plan,
            request_deserializer=weights_pb2.PlanRequest.FromString,
            response_serializer=weights_pb2.PlanResponse.SerializeToString,
        ),
        f"{_SERVICE}Fetch": grpc.unary_stream_rpc_method_handler(
            reading.Fetch,
            request_deserializer=weights_pb2.FetchRequest.FromString,
            response_serializer=weights_pb2.FetchResponse.SerializeToString,
        ),
    }


@asynccontextmanager
async def relaying(
    run: RunFile, upstream: str, *, listen: str = "127.0.0.1:0", name: str = "", grace_s: float = 0.2, store: Any = None
) -> AsyncIterator[Relay]:
    """A relay for the time of the body, its weights in the run folder unless `store` has them."""
    kept = store or WeightStore(run.run.home / "buffer" / "weights", keep_anchors=run.buffer.keep_anchors)
    relay = Relay(run, upstream, kept, listen=listen, name=name or f"{socket.gethostname()}:{listen}")
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop(grace_s)


def serve(run: RunFile, upstream: str) -> int:
    """Relay until SIGTERM or SIGINT. Returns the exit code. Raises UsageError for an address or folder not to be used,
    RunMismatch when the upstream's run has other settings."""
    with locked(run.run.home / "buffer"):
        check_listen(run)
        return asyncio.run(_serve(run, upstream))


async def _serve(run: RunFile, upstream: str) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with relaying(run, upstream, listen=run.buffer.listen, grace_s=_GRACE_S) as relay:
        http = RelayHttp(relay.mirror, run.run.name, run.buffer.http)
        await http.start()
        log.info("run %s: relaying %s on %s (http %s)", run.run.name, upstream, run.buffer.listen, run.buffer.http)
        stopping, failing = asyncio.create_task(stop.wait()), asyncio.create_task(relay.failed())
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        await http.stop()
        stopping.cancel()
        if failing.done():
            await failing
            return EXIT_FAILED
        failing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await failing
    return EXIT_DONE
