"""Become a service that dies with its supervisor: `python -m forebay.fleet.leash PARENT_PID COMMAND …`.

A module of its own instead of `preexec_fn`, which may deadlock in a process with threads (gRPC has many).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: list[str]) -> None:
    """Tie this process to its parent, then replace it by the command; the tie outlives exec."""
    parent, command = int(argv[0]), argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the tie was made
        os.kill(os.getpid(), signal.SIGKILL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
