"""Disks that fail in one way, when told to."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

from tests.buffer.support import UnsyncedDisk


class FailingDisk(UnsyncedDisk):
    """Works until `failing` names an errno; then every write fails with it, or every sync with `failing_sync`.

    `refused` is set once something failed. `room_after` refusals the disk works again.
    """

    def __init__(self) -> None:
        self.failing = self.failing_sync = 0
        self.writes = self.refusals = 0
        self.fail_at_write = 0
        self.room_after = 0
        self.refused = threading.Event()

    def write(self, fd: int, parts: Sequence[bytes], offset: int) -> int:
        """As told."""
        self.writes += 1
        if self.writes == self.fail_at_write:
            self.failing = errno.ENOSPC
        if self.failing:
            self._refuse(self.failing)
        return super().write(fd, parts, offset)

    def sync(self, fd: int) -> None:
        """As told."""
        if self.failing_sync:
            self._refuse(self.failing_sync)

    def _refuse(self, number: int) -> None:
        self.refusals += 1
        if self.refusals == self.room_after:
            self.failing = self.failing_sync = 0
        self.refused.set()
        raise OSError(number, os.strerror(number))


class StallingDisk(UnsyncedDisk):
    """A disk whose syncs wait behind a gate."""

    def __init__(self) -> None:
        self.gate, self.waiting = threading.Event(), threading.Event()
        self.gate.set()

    def sync(self, fd: int) -> None:
        """Once the gate is open."""
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(60)
