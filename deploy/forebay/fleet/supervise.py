"""Who runs, who died, who is started again, and when it is over. No clock, process or terminal of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from forebay.fleet.process import Running, Service, exit_cause, last_lines, usage_line

#: How a service may end when it was asked to: done, or so young that it had no handler yet.
IN_ORDER = (EXIT_DONE, -signal.SIGTERM)
#: Roles that the others call: first to start, last to end.
SERVERS = ("buffer", "reward", "reference")
LINES_SHOWN = 5
FIRST_DELAY_S = 1.0  # before the second restart; doubled for each one after
BUFFER_GRACE_S = 30.0
FAILED_GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the buffer last said, and when (on the supervisor's clock)."""

    at_s: float
    step: int
    steps: int
    state: str


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A service and where it stands: running, waiting to be restarted, left (exit 0, not yet judged), or done."""

    service: Service
    running: Running | None = None
    restarts: int = 0
    restart_at_s: float | None = None
    left_at_s: float | None = None
    done: bool = False


class Supervisor:
    """Keeps services running until the run is over.

    `launch` starts one, `tell` is told what happens, `clock` gives monotonic seconds. `tick` must be called often.
    """

    def __init__(
        self,
        services: Sequence[Service],
        launch: Callable[[Service], Running],
        *,
        max_restarts: int,
        clock: Callable[[], float],
        tell: Callable[[str], None],
    ) -> None:
        self._watched = {service.name: _Watched(service=service) for service in services}
        self._launch = launch
        self._max_restarts = max_restarts
        self._clock = clock
        self._tell = tell
        self._draining = False
        self._ending = False
        self._exit_code = EXIT_DONE
        self._kill_at_s: float | None = None
        self.failure = ""  #: why the run cannot go on, in one line

    # --- what the outside does

    def start(self, role: str) -> None:
        """Start the services of a role."""
        for watched in self._of_role(role):
            watched.running = self._launch(watched.service)

    def tick(self, progress: Progress | None) -> int | None:
        """Look after everything once; the exit code when all is over, else None."""
        for watched in self._watched.values():
            self._look_after(watched, progress)
        if self._kill_at_s is not None and self._clock() >= self._kill_at_s:
            self._lose_patience()
        return self._exit_code if all(watched.done for watched in self._watched.values()) else None

    def drain(self) -> None:
        """Ask samplers and learner to end in order; buffer and frozen models follow when they are gone."""
        self._draining = True
        for role in ("sampler", "learner"):
            for watched in self._of_role(role):
                self._terminate(watched)

    def kill(self) -> None:
        """End everything at once."""
        self._draining = True
        for watched in self._watched.values():
            self._kill(watched)

    @property
    def draining(self) -> bool:
        """Whether nothing is restarted any more."""
        return self._draining

    @property
    def only_buffers_left(self) -> bool:
        """Whether samplers and learner are done, so that nobody will tell buffer or frozen models anything more."""
        return all(watched.done for watched in self._watched.values() if watched.service.role not in SERVERS)

    def end_buffers(self) -> None:
        """Ask buffer and frozen models to end; only once, because a second signal means at once."""
        if self._ending:
            return
        self._ending = self._draining = True
        self._kill_at_s = self._clock() + BUFFER_GRACE_S
        for role in SERVERS:
            for watched in self._of_role(role):
                self._terminate(watched)

    def awaited(self) -> list[str]:
        """Names of what still runs."""
        return [name for name, watched in self._watched.items() if watched.running is not None]

    # --- one service

    def _look_after(self, watched: _Watched, progress: Progress | None) -> None:
        if watched.done:
            return
        code = watched.running.poll() if watched.running is not None else None
        if code is not None:
            watched.running = None
            self._ended(watched, code)
        elif watched.left_at_s is not None:
            self._judge_leaving(watched, progress)
        elif watched.restart_at_s is not None and self._clock() >= watched.restart_at_s:
            watched.restart_at_s = None
            watched.running = self._launch(watched.service)

    def _ended(self, watched: _Watched, code: int) -> None:
        name = watched.service.name
        if self._draining:
            watched.done = True
            if code not in IN_ORDER and not self.failure:
                self._fail(f"{name} did not end in order: {exit_cause(code)}; its log is {watched.service.log}")
        elif code == EXIT_USAGE:
            watched.done = True
            self._exit_code = EXIT_USAGE
            self._fail(usage_line(watched.service.log) or f"{name} refused to start; its log is {watched.service.log}")
        elif code == EXIT_DONE and watched.service.role not in SERVERS:
            watched.left_at_s = self._clock()
        else:
            self._died(watched, exit_cause(code))

    def _judge_leaving(self, watched: _Watched, progress: Progress | None) -> None:
        """Exit 0 is right when the run is over or drained; what the buffer says later than the exit decides."""
        assert watched.left_at_s is not None
        if self._draining:
            watched.done = True
        if watched.done or progress is None or progress.at_s < watched.left_at_s:
            return
        trained = watched.service.role == "learner" and progress.step >= progress.steps
        if trained or progress.state in {"finished", "draining"}:
            watched.done = True
        else:
            watched.left_at_s = None
            self._died(watched, "left before the run was finished")

    def _died(self, watched: _Watched, cause: str) -> None:
        service = watched.service
        self._tell(f"{service.name} died: {cause}; its last lines, from {service.log}:")
        for line in last_lines(service.log, LINES_SHOWN):
            self._tell(f"  {line}")
        if watched.restarts >= self._max_restarts:
            watched.done = True
            self._fail(
                f"{service.name} died: {cause}; fleet.max_restarts = {self._max_restarts} is used up; see {service.log}"
            )
            return
        delay_s = FIRST_DELAY_S * 2 ** (watched.restarts - 1) if watched.restarts else 0.0
        watched.restarts += 1
        watched.restart_at_s = self._clock() + delay_s
        self._tell(f"restarting {service.name} ({watched.restarts} of {self._max_restarts})")

    # --- the end

    def _fail(self, why: str) -> None:
        """The run cannot go on: drain what can be drained, then end what is left."""
        self._exit_code = self._exit_code or EXIT_FAILED
        self.failure = why
        self._tell(why)
        if self._kill_at_s is None:
            self._kill_at_s = self._clock() + FAILED_GRACE_S
        if not self._draining:
            self.drain()

    def _lose_patience(self) -> None:
        """Kill what did not end in its grace; buffer and frozen models have one of their own, they are asked last."""
        self._kill_at_s = None
        for watched in self._watched.values():
            if watched.running is not None and (self._ending or watched.service.role not in SERVERS):
                self._tell(f"{watched.service.name} does not end by itself: killing it")
                self._kill(watched)

    def _kill(self, watched: _Watched) -> None:
        if watched.running is not None:
            watched.running.kill()
        watched.running, watched.done = None, True

    def _terminate(self, watched: _Watched) -> None:
        if watched.running is not None:
            watched.running.terminate()
        else:
            watched.done = True

    def _of_role(self, role: str) -> list[_Watched]:
        return [watched for watched in self._watched.values() if watched.service.role == role]
