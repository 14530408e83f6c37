"""Who is there right now, and what each says it is doing. Volatile; the journal knows who ever joined."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.buffer.ledger import MemberKey
from forebay.wire.version import Version


@dataclass(slots=True)
class Liveness:
    """The last that was heard of a member. Times are the injected clock's seconds."""

    incarnation: int
    seen: float
    doing: str = "starting"
    doing_since: float = 0.0
    version: Version | None = None
    digest: bytes = b""
    gauges: dict[str, float] = field(default_factory=dict)
    left: bool = False


class Members:
    """Liveness by heartbeat. One event loop only."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self.clock = clock
        self._members: dict[MemberKey, Liveness] = {}
        self._swept = clock()

    def joined(self, key: MemberKey, incarnation: int) -> None:
        """A member is there, or, after a restart of the buffer, is given the time to show that it is."""
        now = self.clock()
        self._members[key] = Liveness(incarnation, now, doing_since=now)

    def seen(self, key: MemberKey) -> Liveness:
        """Any call of a member counts as a sign of life."""
        entry = self._members[key]
        entry.seen = self.clock()
        return entry

    def left(self, key: MemberKey) -> None:
        """The member said goodbye."""
        self._members[key].left = True

    def get(self, key: MemberKey) -> Liveness | None:
        """What is known of a member, None when it never joined."""
        return self._members.get(key)

    def state(self, key: MemberKey) -> str:
        """live | lost | left."""
        entry = self._members.get(key)
        if entry is None or entry.left:
            return "left"
        return "lost" if self.clock() - entry.seen > self.timeout_s else "live"

    def is_live(self, key: MemberKey, incarnation: int) -> bool:
        """Whether this very incarnation is live."""
        entry = self._members.get(key)
        return entry is not None and entry.incarnation == incarnation and self.state(key) == "live"

    def sweep(self) -> list[MemberKey]:
        """Members that are lost. A buffer that itself stood still (stopped, swapped) gives everyone that time back."""
        now, stood_still = self.clock(), self.clock() - self._swept
        if stood_still > self.timeout_s / 2:
            for entry in self._members.values():
                entry.seen = min(now, entry.seen + stood_still)
        self._swept = now
        return [key for key in self._members if self.state(key) == "lost"]
