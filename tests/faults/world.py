"""A buffer below gRPC on a machine that fails, and the clients that outlive it.

Each client does as the real ones do: what was not acknowledged is said again, until it is. A promise goes into the
history only when a live process gave it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from forebay.buffer import snapshots
from forebay.buffer.errors import JournalFailed
from forebay.buffer.intake import Intake
from forebay.buffer.outlet import Outlet
from forebay.buffer.records import SEGMENT_SUFFIX
from forebay.buffer.reservoir import Reservoir, open_reservoir
from forebay.buffer.roster import Roster
from forebay.buffer.shelf import Shelf
from forebay.buffer.weight_check import check_weights
from tests.buffer.support import FakeClock, make_run
from tests.faults.history import History
from tests.faults.machine import Machine, MachineDisk, PowerLost

A = TypeVar("A")

SEGMENT_BYTES = 2500


class World:
    """One machine, the buffer that runs on it, and what everybody was promised.

    `crashes` are the lives of the buffer's processes, each as the operation it dies at (None: it lives on) and what
    then becomes of the machine: "kill" leaves the files as they are, "lost" and "torn" take the power away.
    """

    def __init__(self, seed: int, crashes: list[tuple[int | None, str]], **learner: Any) -> None:
        self.rng, self.clock = random.Random(seed), FakeClock()
        self.history, self._crashes = History(), list(crashes)
        self._scratch = Path(tempfile.mkdtemp(prefix="forebay-faults-"))
        (self._scratch / "machine").mkdir()
        self._dropped = self._scratch / "dropped"  #: segments that the buffer deletes, for the checker
        self._dropped.mkdir()
        self.run = make_run(self._scratch / "machine" / "run", buffer={"retain_gb": 0.0}, **learner)
        self.machine = Machine(self._scratch / "machine", random.Random(seed + 1))
        self.boots = 0
        self._fate = ""
        self._disk: MachineDisk | None = None
        self._reservoir: Reservoir | None = None

    # --- the buffer's process

    @property
    def reservoir(self) -> Reservoir:
        assert self._reservoir is not None
        return self._reservoir

    @property
    def disk(self) -> MachineDisk:
        assert self._disk is not None
        return self._disk

    @property
    def journal(self) -> Path:
        return self.run.run.home / "buffer" / "journal"

    @property
    def died(self) -> bool:
        """Whether the process is gone, be it that nobody has noticed yet."""
        return self._disk is None or self._disk.dead

    async def ask(self, attempt: Callable[[], Awaitable[A]]) -> A:
        """What a live process answers, started again as often as it dies."""
        while True:
            if self.died:
                await self._boot()
                continue
            with contextlib.suppress(JournalFailed, PowerLost):
                answer = await attempt()
                if not self.died:
                    return answer
            assert self.disk.dead, "the buffer gave up although its machine works"

    async def durably(self, act: Callable[[], A]) -> A:
        """Do it in the buffer, and wait until it is safe, as every service method does."""

        async def attempt() -> A:
            answer = act()
            await self.reservoir.durable()
            return answer

        return await self.ask(attempt)

    async def restart(self, fate: str = "kill") -> None:
        """The process dies now."""
        if self._disk is not None:
            self._disk.kill()
            self._fate = fate
        await self._boot()

    async def snapshot(self, *, drop: bool) -> None:
        """What the snapshotter does after a sealed segment."""
        folder, sealed = self.journal, self.reservoir.journal.sealed_segment
        if sealed <= max(snapshots.numbers(folder), default=0):
            return

        async def attempt() -> None:
            snapshots.make(folder, sealed, retain_bytes=0, disk=self.disk)
            kept = snapshots.numbers(folder)
            if drop and len(kept) == snapshots.KEPT:
                await asyncio.to_thread(self._drop, kept[0] + 1)

        await self.ask(attempt)

    def _drop(self, before: int) -> None:
        frames = self.reservoir.state.frames
        first = min([before, *(entry.position.segment for entry in frames.values())])
        for path in self.journal.glob(f"*{SEGMENT_SUFFIX}"):
            if int(path.stem) < first:
                shutil.copy(path, self._dropped)
        self.reservoir.journal.drop(first)

    async def _boot(self) -> None:
        """A new process, on what the machine has kept."""
        await self._bury()
        crash_at, self._fate = self._crashes.pop(0) if self._crashes else (None, "kill")
        loop = asyncio.get_running_loop()
        self._disk = self.machine.boot(crash_at, lambda: _let_answers_out(loop))
        self.boots += 1
        with contextlib.suppress(PowerLost):
            self._reservoir = open_reservoir(
                self.run, clock=self.clock, disk=self._disk, segment_bytes=SEGMENT_BYTES, wall=lambda: 0.0
            )
            reservoir = self._reservoir
            self.intake, self.outlet = Intake(reservoir), Outlet(reservoir)
            self.roster, self.shelf = Roster(reservoir), Shelf(reservoir)

    async def _bury(self) -> None:
        if self._reservoir is not None:
            for _ in range(2):  # the first may only find out that the disk is dead
                with contextlib.suppress(JournalFailed, PowerLost):
                    await asyncio.to_thread(self._reservoir.close)
        self._reservoir = None
        if self._disk is not None and self._fate != "kill":
            self.machine.lose_power(torn=self._fate == "torn")

    def _weights(self) -> list[str]:
        state, store = self.reservoir.state, self.reservoir.store
        newest = state.newest
        return check_weights(store.folder, newest, state.published[newest].digest).problems if newest else []

    # --- the end

    async def verdict(self) -> list[str]:
        """Everything that is wrong after one more power cut: what was promised is on the disk."""
        await self.restart("lost")
        await self.durably(lambda: None)
        problems = self.history.check(self._dropped, self.journal) + self._weights()
        await asyncio.to_thread(self.reservoir.close)
        self.machine.close()
        shutil.rmtree(self._scratch)
        return problems


def _let_answers_out(loop: asyncio.AbstractEventLoop) -> None:
    """Before a process dies in another thread, its loop says what it has to say: too early, if the code is wrong."""
    try:
        if asyncio.get_running_loop() is loop:
            return
    except RuntimeError:
        pass
    for _ in range(5):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(5)
