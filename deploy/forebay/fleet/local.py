"""`forebay run`: buffer, learner, samplers and frozen models on this machine, supervised until the run is over."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from forebay.buffer.ports import check_listen
from forebay.config.claim import claimed
from forebay.config.home import clear_home, prepare_home
from forebay.config.model_source import model_source
from forebay.config.models import RunFile
from forebay.errors import EXIT_DONE, EXIT_USAGE, ForebayError, UsageError
from forebay.fleet.ending import conclude
from forebay.fleet.process import Service, ServiceProcess, exit_cause, last_lines, usage_line
from forebay.fleet.readiness import is_ready, wait_ready
from forebay.fleet.reaper import Reaper
from forebay.fleet.services import local_services, model_maker
from forebay.fleet.summary import finished_before, in_words
from forebay.fleet.supervise import SERVERS, Supervisor
from forebay.fleet.wakeups import Wakeups
from forebay.fleet.watcher import Watcher
from forebay.obs.live import Display

TICK_S = 0.5
EXIT_INTERRUPTED = 130


class ServiceFailed(ForebayError, RuntimeError):
    """A service could not be kept running."""


def run_all(run: RunFile, arguments: Sequence[str], *, fresh: bool = False) -> int:
    """Supervise the whole run; `arguments` (run files and flags) are handed to every service.

    Goes on where an earlier run in the same folder stopped; one that is finished only says so. Returns 0 when the run
    is finished or was drained in order, 130 after Ctrl-C. Raises UsageError, or ServiceFailed with the cause.
    """
    home = prepare_home(run)
    with claimed(home):
        if fresh:
            clear_home(run)
        finished = finished_before(run)
        if finished is not None:
            print(f"run {run.run.name} is finished already; --fresh starts it over")
            print("\n".join(in_words(finished)))
            return EXIT_DONE
        check_listen(run)
        log_to(home / "logs" / "run.log")
        with ExitStack() as stack:
            reaper, wakeups = stack.enter_context(Reaper()), stack.enter_context(Wakeups())
            return Session(run, arguments, local_services(run, arguments), reaper, wakeups).run()


class Session:
    """One supervised stretch of a run, from start to summary."""

    def __init__(
        self,
        run: RunFile,
        arguments: Sequence[str],
        services: Sequence[Service],
        reaper: Reaper,
        wakeups: Wakeups,
        *,
        last_step: int | None = None,
        conclude: Callable[[RunFile, Watcher, float], list[str]] = conclude,
    ) -> None:
        """`last_step`: drain once it is committed; the run's own end needs none. `conclude` gives the last lines."""
        self._run, self._arguments, self._wakeups = run, arguments, wakeups
        self._last_step, self._conclude_run = last_step, conclude
        self._launch = partial(ServiceProcess, environment={**os.environ, "PYTHONUNBUFFERED": "1"}, reaper=reaper)
        self._display = Display(run.run.name, sys.stdout)
        self._watcher = Watcher(run.sampler_target, run.run.name)
        self._supervisor = Supervisor(
            services,
            self._launch,
            max_restarts=run.fleet.max_restarts,
            clock=time.monotonic,
            tell=self._display.event,
        )
        self._stops_seen = 0
        self._started_at_s = time.monotonic()

    def run(self) -> int:
        try:
            with self._display:
                self._prepare_model()
                self._start()
                self._until_work_is_over()
                conclusion = self._conclude()
                code = self._until_all_have_ended()
        finally:
            self._supervisor.kill()  # on the ordinary ways here, nothing is left to kill
        if code != EXIT_USAGE and conclusion:
            print("\n".join(conclusion))
        return self._exit_code(code)

    def _prepare_model(self) -> None:
        """Have the model made by a process of its own, or see that it is there. Raises UsageError, ServiceFailed."""
        model = self._run.model
        if model.make is None or Path(model.path).exists():
            model_source(model, self._run.run.seed)
            return
        service = model_maker(self._run, self._arguments)
        maker = self._launch(service)
        try:
            while (code := maker.poll()) is None and not self._wakeups.stops:
                self._display.note(f"making the model with {model.make}", *last_lines(service.log, 1))
                self._display.show(None)
                self._wakeups.wait(TICK_S)
        finally:
            maker.kill()
        self._display.note()
        if code == EXIT_USAGE:
            raise UsageError(usage_line(service.log) or f"the model was not made; see {service.log}")
        if code:
            last = " ".join(last_lines(service.log, 1))
            raise ServiceFailed(f"the model was not made: {exit_cause(code)}: {last} (see {service.log})")

    def _start(self) -> None:
        """The buffer first; learner and samplers when it takes calls. Frozen models may load meanwhile."""
        if self._wakeups.stops:
            return
        for role in SERVERS:
            self._supervisor.start(role)
        going_on = wait_ready(
            partial(is_ready, self._run.buffer.http),
            lambda: self._tick() is None and not self._wakeups.stops,
            self._wakeups.wait,
        )
        if not going_on:
            return  # it ended, and the supervisor knows why; or somebody wants to stop
        self._watcher.start()
        for role in ("learner", "sampler"):
            self._supervisor.start(role)

    def _until_work_is_over(self) -> None:
        while not self._supervisor.only_buffers_left and self._tick() is None:
            self._wakeups.wait(TICK_S)

    def _drain_at_last_step(self) -> None:
        progress = self._watcher.progress
        if self._last_step is None or progress is None or self._supervisor.draining:
            return
        if progress.step >= self._last_step:
            self._supervisor.drain()

    def _conclude(self) -> list[str]:
        if self._watcher.latest is None:
            return [f"run {self._run.run.name}: stopped before it began"]
        return self._conclude_run(self._run, self._watcher, time.monotonic() - self._started_at_s)

    def _until_all_have_ended(self) -> int:
        self._supervisor.end_buffers()
        while (code := self._tick()) is None:
            self._wakeups.wait(TICK_S)
        return code

    def _tick(self) -> int | None:
        """React to signals, deaths and news; the exit code when everything has ended."""
        self._react_to_stops()
        self._drain_at_last_step()
        if self._supervisor.draining:
            waiting = ", ".join(self._supervisor.awaited()) or "nothing"
            self._display.note(f"draining: waiting for {waiting}; Ctrl-C again ends everything at once")
        code = self._supervisor.tick(self._watcher.progress)
        look = self._watcher.latest
        self._display.show(look.status if look is not None else None)
        return code

    def _react_to_stops(self) -> None:
        stops = len(self._wakeups.stops)
        if stops == self._stops_seen:
            return
        if stops == 1:
            self._supervisor.drain()
        else:
            self._supervisor.kill()
        self._stops_seen = stops

    def _exit_code(self, code: int) -> int:
        failure = self._supervisor.failure
        if failure:
            raise UsageError(failure) if code == EXIT_USAGE else ServiceFailed(failure)
        interrupted = signal.SIGINT in self._wakeups.stops or len(self._wakeups.stops) > 1
        return EXIT_INTERRUPTED if interrupted else code


def log_to(path: Path) -> None:
    """The supervisor's own log lines: on the terminal they would tear the view apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s run %(levelname)s %(message)s"))
    logging.getLogger().handlers[:] = [handler]
