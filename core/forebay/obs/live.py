"""The live view: a picture that is redrawn on a terminal, log lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live

from forebay.obs.events import changes
from forebay.obs.view import Picture, plain_line, render
from forebay.wire.v1 import control_pb2

LINE_EVERY_S = 15.0
EVENTS_KEPT = 50


class Display:
    """Shows status answers and events as they come. One thread only.

    On a terminal the picture is redrawn in place; elsewhere a line is printed for every event, every step and, while
    nothing happens, every 15 s.
    """

    def __init__(self, title: str, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._console = Console(file=out, soft_wrap=not out.isatty())
        self._live = Live(console=self._console, auto_refresh=False) if out.isatty() else None
        self._clock = clock
        self._events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._notes: tuple[str, ...] = ()
        self._last: control_pb2.StatusResponse | None = None
        self._line_at_s = -LINE_EVERY_S
        self._line_step = -1

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: control_pb2.StatusResponse | None) -> None:
        """Take in the newest status; None while no buffer answers."""
        if status is not None:
            for event in changes(self._last, status):
                self.event(event)
            self._last = status
        if self._live is None:
            self._print_line(status)
        else:
            self._redraw(status)

    def event(self, text: str) -> None:
        """Something happened; kept in sight for a while."""
        self._events.append(f"{time.strftime('%H:%M:%S')}  {text}")
        if self._live is None:
            self._print(self._events[-1])

    def note(self, *texts: str) -> None:
        """What is so right now, until the next note; no text: nothing special."""
        if self._live is None:
            for text in texts:
                if text not in self._notes:
                    self._print(f"{time.strftime('%H:%M:%S')}  {text}")
        self._notes = texts

    def _redraw(self, status: control_pb2.StatusResponse | None) -> None:
        assert self._live is not None
        shown = status if status is not None else self._last
        picture = Picture(title=self._title, status=shown, events=tuple(self._events), notes=self._notes)
        self._live.update(render(picture), refresh=True)

    def _print_line(self, status: control_pb2.StatusResponse | None) -> None:
        now = self._clock()
        if status is None or (status.step == self._line_step and now - self._line_at_s < LINE_EVERY_S):
            return
        self._line_at_s, self._line_step = now, status.step
        self._print(f"{time.strftime('%H:%M:%S')}  {plain_line(status)}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)
        self._console.file.flush()
