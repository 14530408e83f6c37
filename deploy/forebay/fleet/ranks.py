"""The ranks of a learner on this machine, each a process; torchrun or a cluster's launcher starts them on several."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from forebay.fleet.reaper import kill_group
from forebay.fleet.wakeups import Wakeups
from forebay.loopback import free_addresses

TICK_S = 0.5
#: Seconds that the other ranks have once one has failed: for the lead to say goodbye to the buffer.
GRACE_S = 15.0


class Rank(Protocol):
    """One of the processes that train together, wherever it runs."""

    def poll(self) -> int | None:
        """Its exit code (of a signal, that one's negative number) once it has ended."""
        ...

    def terminate(self) -> None:
        """Ask it to end. Harmless when it has."""
        ...

    def kill(self) -> None:
        """End it now. Harmless when it has ended."""
        ...


class LocalRank:
    """A process of this machine that dies with us."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forebay.fleet.leash", str(os.getpid()), *command],
            env=os.environ | environment,
            process_group=0,  # Ctrl-C in the terminal comes through us, once
        )

    def poll(self) -> int | None:
        """See Rank."""
        return self._process.poll()

    def terminate(self) -> None:
        """See Rank."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """See Rank."""
        kill_group(self._process.pid)
        self._process.wait()


def run_ranks(command: Sequence[str], count: int) -> int:
    """Run `command` as `count` ranks that find each other through the environment, as under torchrun, until all have
    ended; returns 0, or the exit code of the first that failed, which is the end of all. Stop signals are passed on.
    """
    with Wakeups() as wakeups:
        meeting = free_addresses(1)[0]
        environments = [environment_of(rank, count, meeting, local_rank=rank, here=count) for rank in range(count)]
        return watch([LocalRank(command, environment) for environment in environments], wakeups)


def environment_of(rank: int, count: int, meeting: str, *, local_rank: int, here: int) -> dict[str, str]:
    """What makes a process a rank, by torchrun's names: one of `here` on its machine, of `count` in all that meet at
    the address `meeting`. `local_rank` is the number of its accelerator, of those that it sees."""
    host, _, port = meeting.rpartition(":")
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": here}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": host, "MASTER_PORT": port}


def watch(ranks: Sequence[Rank], wakeups: Wakeups) -> int:
    """Until all have ended: see `run_ranks`. None is left behind."""
    try:
        return _watch(ranks, wakeups)
    finally:
        for rank in ranks:
            rank.kill()


def _watch(ranks: Sequence[Rank], wakeups: Wakeups) -> int:
    passed_on, failed_at_s, code = 0, None, 0
    while None in (codes := [rank.poll() for rank in ranks]):
        for _ in wakeups.stops[passed_on:]:
            for rank in ranks:
                rank.terminate()
        passed_on = len(wakeups.stops)
        if failed_at_s is None and (failed := [code for code in codes if code]):
            code, failed_at_s = failed[0], time.monotonic()
        if failed_at_s is not None and (codes[0] or time.monotonic() > failed_at_s + GRACE_S):
            break
        wakeups.wait(TICK_S)
    code = code or next((code for code in codes if code), 0)
    return code if code >= 0 else 128 - code
