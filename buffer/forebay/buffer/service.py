"""`forebay buffer`: one buffer of one run, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal

from forebay.buffer.http import HttpServer
from forebay.buffer.ports import check_listen
from forebay.buffer.reservoir import Reservoir, open_reservoir
from forebay.buffer.run_folder import locked
from forebay.buffer.server import BufferServer
from forebay.config.models import RunFile
from forebay.errors import EXIT_DONE, EXIT_FAILED

log = logging.getLogger(__name__)

#: How long calls in progress may take after SIGTERM.
GRACE_S = 2.0


def serve(run: RunFile) -> int:
    """Serve the run's buffer until SIGTERM or SIGINT (drain; a second one: at once). Returns the exit code.

    Raises UsageError for an address or folder that cannot be used, JournalDamaged for one that must not be.
    """
    with locked(run.run.home / "buffer"):
        check_listen(run)
        return asyncio.run(_serve(run))


async def _serve(run: RunFile) -> int:
    stop = _stop_signals()
    reservoir = open_reservoir(run)
    server = BufferServer(reservoir, run.buffer.listen)
    http = HttpServer(server, run.buffer.http)
    await server.start()
    await http.start()
    _say_what_is_here(reservoir, run)
    code = await _until_stopped(reservoir, stop)
    http.ready = False
    await _shut_down(server, stop, code)
    await http.stop()
    return code


def _say_what_is_here(reservoir: Reservoir, run: RunFile) -> None:
    state = reservoir.state
    log.info(
        "run %s: serving on %s (http %s); step %d of %d, %d groups ready, %d in flight",
        run.run.name,
        run.buffer.listen,
        run.buffer.http,
        state.committed,
        run.learner.steps,
        len(state.buffered),
        len(state.permits) + len(state.again),
    )


def _stop_signals() -> asyncio.Queue[signal.Signals]:
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    return signals


async def _until_stopped(reservoir: Reservoir, stop: asyncio.Queue[signal.Signals]) -> int:
    """Return the exit code once a signal comes or the journal fails."""
    waiting = asyncio.create_task(stop.get())
    failing = asyncio.create_task(reservoir.failed())
    await asyncio.wait([waiting, failing], return_when=asyncio.FIRST_COMPLETED)
    failing.cancel()
    if reservoir.failure.done():
        waiting.cancel()
        log.error("%s", reservoir.failure.result())
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
