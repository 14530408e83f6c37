"""One served buffer a test, in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from forebay.buffer.client import BufferClient
from forebay.buffer.disk import Disk
from forebay.buffer.reservoir import Reservoir, open_reservoir
from forebay.buffer.roster import Roster
from forebay.buffer.server import BufferServer, serving
from forebay.config.models import RunFile
from tests.buffer.support import FakeClock, UnsyncedDisk, make_run


@dataclass(kw_only=True)
class Served:
    """A running buffer and how to reach it."""

    run: RunFile
    server: BufferServer
    clock: FakeClock

    @property
    def reservoir(self) -> Reservoir:
        return self.server.reservoirs[0]

    @property
    def roster(self) -> Roster:
        return next(iter(self.server.tenants)).roster

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def client(self, **options: Any) -> BufferClient:
        return BufferClient(self.address, on_trouble=lambda line: None, **options)


class Serve(Protocol):
    """Starts a buffer in the test's folder; a second time it finds what the first one left."""

    def __call__(
        self, *, disk: Disk | None = None, port: int = 0, **settings: Any
    ) -> AbstractAsyncContextManager[Served]: ...


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    clock = FakeClock()

    @asynccontextmanager
    async def start(*, disk: Disk | None = None, port: int = 0, **settings: Any) -> AsyncIterator[Served]:
        run = make_run(tmp_path / "run", **settings)
        reservoir = open_reservoir(run, clock=clock, disk=disk or UnsyncedDisk())
        async with serving(reservoir, listen=f"127.0.0.1:{port}", grace_s=0.0) as server:
            yield Served(run=run, server=server, clock=clock)

    return start
