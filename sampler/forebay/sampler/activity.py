"""What this sampler does, since when, and how much: what its heartbeats say."""

from __future__ import annotations

import time
from collections.abc import Callable


class Activity:
    """The service's counters and its one current doing. One event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._doing, self._since = "starting", clock()
        self._tokens = 0
        self._idle_s, self._idle_since = 0.0, clock()
        self._idle = True
        self._beat = clock()
        self.running_groups = 0
        self.dropped_groups = 0
        self.installs = 0
        self.failed_installs = 0
        self.replans = 0
        self.update_pause_s = 0.0

    @property
    def doing(self) -> str:
        """For people: `generating`, `waiting: learner to publish step 3`, …"""
        return self._doing

    @property
    def since_s(self) -> float:
        """Seconds in that state."""
        return self._clock() - self._since

    def now(self, doing: str) -> None:
        """Enter a state; entering the one it is in changes nothing."""
        if doing != self._doing:
            self._doing, self._since = doing, self._clock()

    def generated(self, tokens: int) -> None:
        """Count tokens of finished replies."""
        self._tokens += tokens

    def group_started(self) -> None:
        """One more group is generating."""
        self.running_groups += 1
        self._set_idle(False)

    def group_ended(self) -> None:
        """One less is."""
        self.running_groups -= 1
        self._set_idle(self.running_groups == 0)

    def take_gauges(self) -> dict[str, float]:
        """The gauges of a heartbeat; rates are since the last call."""
        now = self._clock()
        elapsed_s = max(now - self._beat, 1e-9)
        self._set_idle(self._idle)
        gauges = {
            "tokens_per_s": self._tokens / elapsed_s,
            "running_groups": float(self.running_groups),
            "wait_share": min(1.0, self._idle_s / elapsed_s),
            "update_pause_s": self.update_pause_s,
            "installs": float(self.installs),
            "failed_installs": float(self.failed_installs),
            "dropped_groups": float(self.dropped_groups),
        }
        self._tokens, self._idle_s, self._beat = 0, 0.0, now
        return gauges

    def _set_idle(self, idle: bool) -> None:
        now = self._clock()
        if self._idle:
            self._idle_s += now - self._idle_since
        self._idle, self._idle_since = idle, now
