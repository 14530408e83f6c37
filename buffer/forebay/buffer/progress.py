"""How far the journal has got, and who waits for which of its records to be safe. One event loop only."""

from __future__ import annotations

import asyncio
import heapq
import itertools

from forebay.buffer.errors import JournalFailed
from forebay.buffer.journal import Journal
from forebay.wire.v1 import experience_pb2

Level = int  #: an experience_pb2.AckLevel

_Waiting = tuple[int, int, asyncio.Future[None]]


class Progress:
    """Wakes exactly those whose record has become safe, however many others wait."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: dict[Level, list[_Waiting]] = {experience_pb2.WRITTEN: [], experience_pb2.DURABLE: []}
        self._order = itertools.count()
        self._failure: JournalFailed | None = None

    def reached(self, level: Level) -> int:
        """The last record that is as safe as `level` says."""
        if level == experience_pb2.MEMORY:
            return self._journal.last_lsn
        return self._journal.written_lsn if level == experience_pb2.WRITTEN else self._journal.durable_lsn

    async def wait(self, lsn: int, level: Level) -> int:
        """Return what is reached once that includes `lsn`. Raises JournalFailed if it never will."""
        if self.reached(level) < lsn:
            if self._failure is not None:
                raise self._failure
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting[level], (lsn, next(self._order), waiter))
            await waiter
        return self.reached(level)

    def advance(self) -> None:
        """The journal has got further."""
        for level, waiting in self._waiting.items():
            reached = self.reached(level)
            while waiting and waiting[0][0] <= reached:
                waiter = heapq.heappop(waiting)[2]
                if not waiter.done():
                    waiter.set_result(None)

    def fail(self, error: JournalFailed) -> None:
        """Nothing more will be safe."""
        self._failure = error
        for waiting in self._waiting.values():
            for _, _, waiter in waiting:
                if not waiter.done():
                    waiter.set_exception(error)
            waiting.clear()
