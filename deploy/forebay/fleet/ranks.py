"""The ranks of a learner on this machine, each a process; torchrun or a cluster's launcher starts them on several."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from forebay.fleet.reaper import kill_group
from forebay.fleet.wakeups import Wakeups
from forebay.loopback import free_addresses

TICK_S = 0.5
#: Seconds that the other ranks have once one has failed: for the lead to say goodbye to the buffer.
GRACE_S = 15.0


def run_ranks(command: Sequence[str], count: int) -> int:
    """Run `command` as `count` ranks that find each other through the environment, as under torchrun, until all have
    ended; returns 0, or the exit code of the first that failed, which is the end of all. Stop signals are passed on.
    """
    with Wakeups() as wakeups:
        meeting = free_addresses(1)[0]
        ranks = [_start(command, rank, count, meeting) for rank in range(count)]
        try:
            return _watch(ranks, wakeups)
        finally:
            for rank in ranks:
                kill_group(rank.pid)
                rank.wait()


def _start(command: Sequence[str], rank: int, count: int, meeting: str) -> subprocess.Popen[bytes]:
    host, port = meeting.split(":")
    environment = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": host, "MASTER_PORT": port,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "forebay.fleet.leash", str(os.getpid()), *command],
        env=os.environ | {name: str(value) for name, value in environment.items()},
        process_group=0,  # Ctrl-C in the terminal comes through us, once
    )


def _watch(ranks: Sequence[subprocess.Popen[bytes]], wakeups: Wakeups) -> int:
    passed_on, failed_at_s, code = 0, None, 0
    while None in [rank.poll() for rank in ranks]:
        for _ in wakeups.stops[passed_on:]:
            _terminate(ranks)
        passed_on = len(wakeups.stops)
        if failed_at_s is None and (codes := [rank.returncode for rank in ranks if rank.returncode]):
            code, failed_at_s = codes[0], time.monotonic()
        lead_failed = bool(ranks[0].returncode)
        if failed_at_s is not None and (lead_failed or time.monotonic() > failed_at_s + GRACE_S):
            break
        wakeups.wait(TICK_S)
    code = code or next((rank.returncode for rank in ranks if rank.returncode), 0)
    return code if code >= 0 else 128 - code


def _terminate(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            rank.send_signal(signal.SIGTERM)
