"""A TCP proxy whose line can be cut, stalled, slowed down and made deaf in one direction."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_CHUNK_BYTES = 64 << 10


@dataclass(slots=True)
class Line:
    """How the line behaves just now, in each direction. `delay_s` is one way."""

    delay_s: float = 0.0
    up: asyncio.Event = field(default_factory=asyncio.Event)  #: set while bytes pass from the client to the buffer
    down: asyncio.Event = field(default_factory=asyncio.Event)
    reachable: bool = True
    connections: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class Proxy:
    """Forwards connections to `port` on this machine; `address` is what clients dial."""

    def __init__(self, port: int) -> None:
        self._port, self.line = port, Line()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.mend()

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Every connection breaks, and new ones are refused."""
        self.line.reachable = False
        for writer in self._writers:
            writer.transport.abort()

    def stall(self, *, up: bool = True, down: bool = True) -> None:
        """Half-open: nothing passes any more in these directions, and nobody is told."""
        for event, stops in ((self.line.up, up), (self.line.down, down)):
            if stops:
                event.clear()

    def mend(self) -> None:
        """All is well; what was held back is delivered to those still there."""
        self.line.reachable = True
        self.line.up.set()
        self.line.down.set()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        """Hang up."""
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.line.connections += 1
        if not self.line.reachable:
            return writer.transport.abort()
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, there_writer}
        for source, target, is_up in ((reader, there_writer, True), (there_reader, writer, False)):
            task = asyncio.create_task(self._forward(source, target, is_up=is_up))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return None

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_up: bool) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=4096)
        sending = asyncio.create_task(self._send(queue, target, is_up=is_up))
        loop = asyncio.get_running_loop()
        try:
            while data := await source.read(_CHUNK_BYTES):
                await queue.put((loop.time() + self.line.delay_s, data))
        except ConnectionError:
            pass
        await queue.put((0.0, b""))
        with contextlib.suppress(ConnectionError):
            await sending
        target.close()
        self._writers.discard(target)

    async def _send(
        self, queue: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter, *, is_up: bool
    ) -> None:
        loop, gate = asyncio.get_running_loop(), self.line.up if is_up else self.line.down
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            await gate.wait()
            if not data:
                return
            if is_up:
                self.line.bytes_up += len(data)
            else:
                self.line.bytes_down += len(data)
            target.write(data)
            try:
                await target.drain()
            except ConnectionError:
                return


@asynccontextmanager
async def proxied(port: int) -> AsyncIterator[Proxy]:
    """A proxy for the time of the body."""
    proxy = Proxy(port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
