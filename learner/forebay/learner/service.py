"""`forebay learner`."""

from __future__ import annotations

import logging

from forebay.buffer.client import BlockingClient
from forebay.config.models import RunFile
from forebay.learner.loop import run_learner
from forebay.learner.stop import Stop


def serve(run: RunFile) -> int:
    """Run the learner until it is done, drained or failed; returns the exit code. Raises UsageError."""
    stop = Stop()
    stop.on_signals()
    with BlockingClient(run.learner_target, on_trouble=logging.getLogger("forebay.learner").warning) as client:
        return run_learner(run, client, stop)
