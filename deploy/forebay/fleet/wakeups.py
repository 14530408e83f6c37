"""Sleep that signals end: Ctrl-C, a request to stop, a child that died."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Wakeups:
    """While entered, stop signals are counted instead of raised, and `wait` returns at once on any signal.

    A pipe and not a `threading.Event`: a handler that sets an Event may run while its thread holds the Event's lock.
    """

    def __init__(self) -> None:
        self.stops: list[signal.Signals] = []
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Wakeups:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            self._handlers[number] = signal.signal(number, self._stop)
        self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._wake)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before)
        os.close(self._read)
        os.close(self._write)

    def wait(self, timeout_s: float) -> None:
        """Return after `timeout_s`, or as soon as a signal came."""
        if select.select([self._read], [], [], timeout_s)[0]:
            os.read(self._read, 4096)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self.stops.append(signal.Signals(number))

    def _wake(self, _number: int, _frame: FrameType | None) -> None:
        pass
