"""One service as a process of its own: its group, its log, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forebay.fleet.reaper import Reaper, kill_group

TAIL_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What is started: `name` is unique (`sampler-0`), `role` says what it is (`sampler`)."""

    name: str
    role: str
    command: tuple[str, ...]
    log: Path


class Running(Protocol):
    """A started service, as the supervisor sees it."""

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that killed it), or None while it runs."""
        ...

    def terminate(self) -> None:
        """Ask it to drain."""
        ...

    def kill(self) -> None:
        """End it and everything it started, at once."""
        ...


class ServiceProcess:
    """A service in its own process group, tied to this process's life, its output in its log."""

    def __init__(self, service: Service, environment: Mapping[str, str], reaper: Reaper) -> None:
        self._reaper = reaper
        self._code: int | None = None
        service.log.parent.mkdir(parents=True, exist_ok=True)
        with service.log.open("ab") as log:
            log.write(f"--- {service.name} started {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forebay.fleet.leash", str(os.getpid()), *service.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                process_group=0,
            )
        reaper.watch(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id, and id of the group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code or None; once it has ended, nothing of its group is left."""
        if self._code is None and (code := self._process.poll()) is not None:
            kill_group(self.pid)  # an engine that outlived its service would hold its memory and port
            self._reaper.forget(self.pid)
            self._code = code
        return self._code

    def terminate(self) -> None:
        """SIGTERM to the service alone: it tells its own children."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the group; returns when the service itself is gone."""
        kill_group(self.pid)
        self._process.wait()


def exit_cause(code: int) -> str:
    """`exit code 1`, or the signal's name."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}" + (" (by hand, or out of memory)" if -code == signal.SIGKILL else "")


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines that the service wrote since it started last; few of a long log are read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    starts = [index for index, line in enumerate(lines) if line.startswith("--- ")]
    own = lines[starts[-1] + 1 :] if starts else lines
    return [line for line in own if line.strip()][-count:]


def usage_line(log: Path) -> str | None:
    """The one line of a service that ended with a usage error, without `forebay: `."""
    told = [line for line in last_lines(log, 50) if line.startswith("forebay: ")]
    return told[-1].removeprefix("forebay: ") if told else None
