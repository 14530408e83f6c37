"""Where the seconds go: every moment of a loop charged to exactly one named cause."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseClock:
    """Attributes wall time to the innermost open phase, or to `other` when none is open. One thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stack = ["other"]
        self._seconds: dict[str, float] = defaultdict(float)
        self._mark = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the body to `name`; a phase opened inside takes over until it closes."""
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def take(self) -> dict[str, float]:
        """Seconds by cause since the last call; they sum to the wall time between the calls."""
        self._charge()
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def _charge(self) -> None:
        now = self._clock()
        self._seconds[self._stack[-1]] += now - self._mark
        self._mark = now
