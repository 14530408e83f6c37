"""`forebay learner`."""

from __future__ import annotations

import logging
import time

from forebay.buffer.client import BlockingClient
from forebay.config.models import RunFile
from forebay.learner.loop import run_learner
from forebay.learner.stop import Stop
from forebay.rank import rank

#: Seconds that a rank other than the lead keeps an error to itself.
PATIENCE_S = 5.0


def serve(run: RunFile) -> int:
    """Run the learner until it is done, drained or failed; returns the exit code. Raises UsageError."""
    stop = Stop()
    stop.on_signals()
    told = logging.getLogger("forebay.learner").warning
    with BlockingClient(run.learner_target, on_trouble=told, in_a_hurry=lambda: stop.asked) as client:
        try:
            return run_learner(run, client, stop)
        except Exception:
            if rank() > 0:
                # It may only have lost the others, or fail as all do: whoever started us ends us, and the lead tells.
                time.sleep(PATIENCE_S)
            raise
