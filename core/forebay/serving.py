"""What services with an event loop share: being told to stop, and long work beside the loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

EXIT_AT_ONCE = 130


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """What `work` returns, done in a thread that keeps nobody from ending the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended without waiting
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return done


def stop_signals() -> asyncio.Event:
    """Set at the first signal; the second ends the process."""
    stop = asyncio.Event()

    def signalled(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(EXIT_AT_ONCE)
        log.info("%s: finishing calls in progress, then stopping; once more to stop at once", number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled, number)
    return stop
