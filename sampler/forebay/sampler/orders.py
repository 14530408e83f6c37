"""When to stop, and how."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from forebay.sampler.beside import end

T = TypeVar("T")

log = logging.getLogger("forebay.sampler")

EXIT_AT_ONCE = 130


class Orders:
    """What the user, the machine and the buffer want of this service. One event loop only."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self.finished = False  #: the run is over
        self.reason = ""  #: why to drain; empty when not told to

    @property
    def stopping(self) -> bool:
        """No new group may be started."""
        return self._stop.is_set()

    async def wait(self) -> None:
        """Until told to stop, for whatever reason."""
        await self._stop.wait()

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` returns; None when it was given up because it is time to stop."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            await end(task, stop)

    def finish(self) -> None:
        """The run is over: nothing in flight is of use any more."""
        self.finished = True
        self._stop.set()

    def drain(self, reason: str) -> None:
        """Finish or hand back what is in flight, then leave."""
        if not self._stop.is_set():
            log.info("draining: %s", reason)
            self.reason = reason
            self._stop.set()

    def listen_to_signals(self) -> None:
        """SIGTERM and SIGINT drain; a second one ends the process at once, its children with it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: int) -> None:
        if self._stop.is_set():
            os._exit(EXIT_AT_ONCE)
        log.info("%s: once more to stop at once", signal.Signals(number).name)
        self.drain(signal.Signals(number).name)
