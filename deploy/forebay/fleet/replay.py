"""Train recorded batches again: buffer and learner on this machine, no sampler."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from forebay.config.claim import claimed
from forebay.config.models import RunFile
from forebay.fleet.local import Session, log_to
from forebay.fleet.reaper import Reaper
from forebay.fleet.services import replay_services
from forebay.fleet.wakeups import Wakeups


def train_again(run: RunFile, arguments: Sequence[str], last_step: int) -> int:
    """Supervise buffer and learner in a prepared run folder until `last_step` is committed; returns the exit code.

    Nobody evaluates, so the buffer never calls the run finished: it is over when the learner has left. Raises
    UsageError, ServiceFailed.
    """
    home = run.run.home
    with claimed(home), ExitStack() as stack:
        log_to(home / "logs" / "run.log")
        reaper, wakeups = stack.enter_context(Reaper()), stack.enter_context(Wakeups())
        return Session(
            run,
            arguments,
            replay_services(run, arguments),
            reaper,
            wakeups,
            last_step=last_step if last_step < run.learner.steps else None,
            conclude=lambda run, watcher, seconds: [],
        ).run()
