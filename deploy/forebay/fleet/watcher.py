"""Looks at the buffer from a thread of its own, so that no silence of the buffer's stops the supervisor."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.buffer.client import BlockingClient
from forebay.fleet.supervise import Progress
from forebay.obs.view import live_samplers
from forebay.wire.v1 import control_pb2

EVERY_S = 1.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WaitShare:
    """Mean share of time that samplers had nothing to generate, weighted by the time between looks."""

    seconds: float = 0.0
    waited_s: float = 0.0

    def add(self, status: control_pb2.StatusResponse, elapsed_s: float) -> None:
        """Count one look."""
        for member in live_samplers(status):
            if "wait_share" in member.gauges:
                self.seconds += elapsed_s
                self.waited_s += elapsed_s * member.gauges["wait_share"]

    @property
    def share(self) -> float | None:
        """0 to 1; None when no sampler ever told."""
        return self.waited_s / self.seconds if self.seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A status answer and when it came."""

    status: control_pb2.StatusResponse
    at_s: float

    @property
    def progress(self) -> Progress:
        """What the supervisor needs of it."""
        status = self.status
        return Progress(at_s=self.at_s, step=status.step, steps=status.steps, state=status.state)


@dataclass(slots=True)
class Watcher:
    """The newest look at `run` in the buffer at `address`, about once a second."""

    address: str
    run: str = ""
    clock: Callable[[], float] = time.monotonic
    samplers: WaitShare = field(default_factory=WaitShare)
    latest: Look | None = None

    def start(self) -> None:
        """Begin; the thread ends with the process."""
        threading.Thread(target=self._watch, name="watcher", daemon=True).start()

    @property
    def progress(self) -> Progress | None:
        """Of the newest look."""
        return self.latest.progress if self.latest is not None else None

    def _watch(self) -> None:
        pause = threading.Event()
        try:
            with BlockingClient(self.address, run=self.run) as client:
                while True:
                    self._look(client)
                    pause.wait(EVERY_S)
        except Exception:  # the run goes on unseen
            log.exception("the view of the run stopped")

    def _look(self, client: BlockingClient) -> None:
        asked_at_s = self.clock()
        status = client.status()
        if self.latest is not None:
            self.samplers.add(status, asked_at_s - self.latest.at_s)
        # The moment before asking: what ended after it may not be in the answer.
        self.latest = Look(status=status, at_s=asked_at_s)
