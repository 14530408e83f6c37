"""Kills what a supervisor leaves behind: `python -m forebay.fleet.reaper` with a pipe for standard input.

The leash ends a service's own process with its supervisor, but not that one's children (vLLM's engine). The reaper is
told of every process group, `+PGID` and `-PGID` a line; when the pipe closes, the supervisor is gone, whatever killed
it, and so are the groups.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from types import TracebackType


class Reaper:
    """The supervisor's end: starts the process and keeps it informed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )

    def __enter__(self) -> Reaper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def watch(self, group: int) -> None:
        """From now on the group must not outlive the supervisor."""
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """The group is gone; its number may come to mean another."""
        self._tell(f"-{group}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a killed reaper is no reason to end a run
            print(line, file=self._process.stdin, flush=True)


def kill_group(group: int) -> None:
    """SIGKILL to every process of the group, if there is one left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def reap(lines: Iterable[str]) -> None:
    """Follow the lines to their end, then kill the groups that are left."""
    groups: set[int] = set()
    for line in lines:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        kill_group(group)


if __name__ == "__main__":
    reap(sys.stdin)
