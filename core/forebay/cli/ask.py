"""Ask a running buffer something, and say in one line when none answers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, NoReturn, TypeVar

from forebay.errors import EXIT_FAILED, ForebayError

if TYPE_CHECKING:
    from forebay.buffer.client import BlockingClient

Answer = TypeVar("Answer")

CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 10.0


class NoBuffer(ForebayError, ConnectionError):
    """Nothing answers at the buffer's address, or not in time."""

    exit_code = EXIT_FAILED


def ask(address: str, question: Callable[[BlockingClient], Answer], run: str = "") -> Answer:
    """One question to the buffer at `address`, about `run` if it serves several.

    Raises NoBuffer within about 12 s: services wait, people do not.
    """
    probe(address)
    from forebay.buffer.client import BlockingClient

    answers: Queue[Callable[[], Answer]] = Queue()

    def put() -> None:
        try:
            with BlockingClient(address, on_trouble=_silent, run=run) as client:
                answer = question(client)
        except BaseException as error:
            answers.put(partial(_raise, error))
        else:
            answers.put(lambda: answer)

    # A daemon thread: the client tries for ever, and the process must be able to end before it does.
    Thread(target=put, name="ask", daemon=True).start()
    try:
        return answers.get(timeout=ANSWER_TIMEOUT_S)()
    except Empty as error:
        raise NoBuffer(f"the buffer at {address} does not answer within {ANSWER_TIMEOUT_S:.0f} s") from error


def _silent(_trouble: str) -> None:
    """The client would log each try; here the deadline speaks."""


def _raise(error: BaseException) -> NoReturn:
    raise error


def probe(address: str) -> None:
    """Raises NoBuffer when nothing listens at `address`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise NoBuffer(f"no buffer answers at {address} ({reason}); start one: forebay buffer run.toml") from error
