"""Payloads that training is done with: kept a while for replay, then given back to the file system."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from forebay.buffer.records import Position


class Retention:
    """The payloads that are kept although nobody needs them, the earliest released first."""

    def __init__(self, limit_bytes: int, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_bytes, self._limit_s, self._clock = limit_bytes, limit_s, clock
        self._kept: deque[tuple[Position, float]] = deque()
        self.bytes = 0

    def keep(self, positions: Iterable[Position]) -> None:
        """These are needed no longer."""
        now = self._clock()
        for position in positions:
            self._kept.append((position, now))
            self.bytes += position.payload_bytes

    def due(self, *, make_room: bool) -> list[Position]:
        """What is beyond the limits of bytes or age, or simply everything when room is needed; it is forgotten here."""
        found: list[Position] = []
        while self._kept and (make_room or self._is_due(self._kept[0][1])):
            position, _ = self._kept.popleft()
            self.bytes -= position.payload_bytes
            found.append(position)
        return found

    @property
    def first_segment(self) -> int | None:
        """The oldest segment with a kept payload; None when nothing is kept."""
        return min((position.segment for position, _ in self._kept), default=None)

    def _is_due(self, since: float) -> bool:
        return self.bytes > self._limit_bytes or self._clock() - since > self._limit_s
