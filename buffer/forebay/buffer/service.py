"""`forebay buffer`: one buffer of one run, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from contextlib import ExitStack

from forebay.buffer.http import HttpServer
from forebay.buffer.ports import check_listen
from forebay.buffer.reservoir import Reservoir, open_reservoir
from forebay.buffer.run_folder import locked
from forebay.buffer.server import BufferServer
from forebay.config.models import RunFile
from forebay.errors import EXIT_DONE, EXIT_FAILED, UsageError

log = logging.getLogger(__name__)

#: How long calls in progress may take after SIGTERM.
GRACE_S = 2.0


def serve(run: RunFile, *others: RunFile) -> int:
    """Serve the run's buffer until SIGTERM or SIGINT (drain; a second one: at once). Returns the exit code.

    `others` are runs that the same buffer serves, on the first one's addresses, each in its own folder. Raises
    UsageError for an address or folder that cannot be used, JournalDamaged for one that must not be.
    """
    runs = (run, *others)
    _check_names(runs)
    with ExitStack() as locks:
        for each in runs:
            locks.enter_context(locked(each.run.home / "buffer"))
        check_listen(run)
        return asyncio.run(_serve(runs))


async def _serve(runs: Sequence[RunFile]) -> int:
    stop = _stop_signals()
    reservoirs = [open_reservoir(run) for run in runs]
    server = BufferServer(reservoirs, runs[0].buffer.listen)
    http = HttpServer(server, runs[0].buffer.http)
    await server.start()
    await http.start()
    for reservoir in reservoirs:
        _say_what_is_here(reservoir, runs[0])
    code = await _until_stopped(reservoirs, stop)
    http.ready = False
    await _shut_down(server, stop, code)
    await http.stop()
    return code


def _check_names(runs: Sequence[RunFile]) -> None:
    names = [run.run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"run.name {name} is in two of the run files: a buffer tells its runs apart by their names"
            )


def _say_what_is_here(reservoir: Reservoir, first: RunFile) -> None:
    state, rules = reservoir.state, reservoir.rules
    log.info(
        "run %s: serving on %s (http %s); step %d of %d, %d groups ready, %d in flight",
        rules.run,
        first.buffer.listen,
        first.buffer.http,
        state.committed,
        rules.steps,
        len(state.buffered),
        len(state.permits) + len(state.again),
    )


def _stop_signals() -> asyncio.Queue[signal.Signals]:
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    return signals


async def _until_stopped(reservoirs: Sequence[Reservoir], stop: asyncio.Queue[signal.Signals]) -> int:
    """Return the exit code once a signal comes or a journal fails."""
    waiting = asyncio.create_task(stop.get())
    failing = [asyncio.create_task(reservoir.failed()) for reservoir in reservoirs]
    await asyncio.wait([waiting, *failing], return_when=asyncio.FIRST_COMPLETED)
    for task in failing:
        task.cancel()
    failures = [reservoir.failure.result() for reservoir in reservoirs if reservoir.failure.done()]
    if failures:
        waiting.cancel()
        log.error("%s", failures[0])
        return EXIT_FAILED
    log.info("%s: finishing calls in progress, then stopping", waiting.result().name)
    return EXIT_DONE


async def _shut_down(server: BufferServer, stop: asyncio.Queue[signal.Signals], code: int) -> None:
    stopping = asyncio.create_task(server.stop(GRACE_S if code == EXIT_DONE else 0.0))
    again = asyncio.create_task(stop.get())
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    if again.done():
        await server.stop(0.0)
    again.cancel()
    await stopping
