"""Asking the learner to stop: politely once (finish the step, save, leave), then at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class Stop:
    """A flag with a reason; the first reason stays."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""
        self.failed = False  #: the learner must not go on, rather than need not

    def ask(self, reason: str, *, failed: bool = False) -> None:
        """Stop after the current step."""
        if not self._event.is_set():
            self.reason, self.failed = reason, failed
            self._event.set()

    @property
    def asked(self) -> bool:
        """Whether somebody asked."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until somebody asks; False when `timeout_s` passed first."""
        return self._event.wait(timeout_s)

    def on_signals(self) -> None:
        """SIGTERM and SIGINT ask; the second one ends the process at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)
        self.ask(signal.Signals(number).name)
