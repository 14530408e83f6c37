"""The end of a run: ask the buffer a last time, draw, store and tell what it came to."""

from __future__ import annotations

import logging
from pathlib import Path

from forebay.cli.ask import NoBuffer, ask
from forebay.config.models import RunFile
from forebay.errors import UsageError
from forebay.fleet.summary import in_words, store, summarize
from forebay.fleet.watcher import Watcher
from forebay.obs.history import History, from_response
from forebay.obs.plot import draw

log = logging.getLogger(__name__)


def conclude(run: RunFile, watcher: Watcher, seconds: float) -> list[str]:
    """The lines that end a run; stores the summary and the plot. The buffer must still be there."""
    try:
        status, history_answer, ledger = ask(
            run.sampler_target, lambda buffer: (buffer.status(), buffer.history(), buffer.ledger()), run.run.name
        )
    except NoBuffer as error:
        return [f"no summary: {error}"]
    history = from_response(history_answer)
    plot, trouble = _plot(run, history)
    summary = summarize(
        run,
        status,
        history,
        ledger,
        seconds=seconds,
        sampler_wait_share=watcher.samplers.share,
        plot=plot,
    )
    store(summary, run.run.home)
    return [*in_words(summary), *trouble]


def _plot(run: RunFile, history: History) -> tuple[Path | None, list[str]]:
    """The PNG's path, or why there is none: seeing must never fail a run."""
    if not run.observe.plot:
        return None, []
    try:
        return draw(history, run.run.home / "plot.png", run.run.name), []
    except UsageError as error:
        return None, [f"no plot: {error}"]
    except Exception as error:
        log.exception("plot")
        return None, [f"no plot: {type(error).__name__}: {error}"]
