"""The learner's heartbeat: what it does or waits for, and since when, for `forebay status`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from forebay.buffer.client import Fenced
from forebay.errors import ForebayError
from forebay.learner.port import BufferPort
from forebay.learner.publisher import Publisher
from forebay.learner.stop import Stop

log = logging.getLogger(__name__)


class Heart:
    """Beats in a thread of its own, so that a long step is no silence."""

    def __init__(
        self,
        client: BufferPort,
        stop: Stop,
        publisher: Publisher,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._stop = stop
        self._publisher = publisher
        self._interval_s = interval_s
        self._clock = clock
        self._doing, self._since = "starting", clock()
        self.gauges: dict[str, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="heart", daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()

    def doing(self, what: str) -> None:
        """From now on the learner does, or waits for, `what`."""
        if what != self._doing:
            self._doing, self._since = what, self._clock()

    def beat(self) -> None:
        """One heartbeat now, and heed the answer."""
        stored = self._publisher.last
        answer = self._client.heartbeat(
            self._doing,
            self._clock() - self._since,
            stored.version if stored else None,
            stored.digest if stored else b"",
            dict(self.gauges),
        )
        if answer.fenced:
            self._stop.ask("a newer learner took this one's place", failed=True)
        elif answer.drain:
            self._stop.ask("the run is drained")

    def _beat_on(self) -> None:
        while not self._ended.is_set():
            try:
                self.beat()
            except Fenced as error:
                self._stop.ask(str(error), failed=True)
                return
            except ForebayError as error:
                log.warning("heartbeat: %s", error)
            self._ended.wait(self._interval_s)
