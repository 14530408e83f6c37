"""Waking whoever waits for a change, without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Signal:
    """Says "something changed" to all who wait. One event loop only."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self.closed = False

    def notify(self) -> None:
        """Wake everybody who waits now."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def close(self) -> None:
        """Wake everybody for good: from now on nobody waits."""
        self.closed = True
        self.notify()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next `notify`, or after `timeout_s`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            self._waiters.discard(waiter)

    async def until(
        self, attempt: Callable[[], T | None], wait_s: float, give_up: Callable[[], bool] = lambda: False
    ) -> T | None:
        """What `attempt` finds, tried again after each change for `wait_s` at most; None when it found nothing."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while (found := attempt()) is None and loop.time() < deadline and not self.closed and not give_up():
            await self.wait(deadline - loop.time())
        return found
