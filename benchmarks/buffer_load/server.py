"""The buffer under load: a real `forebay buffer run.toml` process, what it takes of the machine, and its end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.buffer_load.commands import ROOT
from forebay.buffer.client import BlockingClient
from forebay.config.toml_text import toml_text
from forebay.loopback import free_addresses
from forebay.wire.v1 import control_pb2, experience_pb2

START_TIMEOUT_S = 120.0
MEMBER_TIMEOUT_S = 3600.0  #: load processes send no heartbeats

#: A run file's sections and their keys.
RunSections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """What of a run file matters here. Staleness has no bound: every group of every step may be started at once."""

    group_size: int
    groups_per_step: int
    steps: int

    def run_file(self) -> RunSections:
        """What a run file says about it."""
        return {
            "run": {"name": "bench"},
            "model": {"path": "none"},
            "task": {"name": "none", "heldout_prompts": 0},
            "buffer": {"member_timeout_s": MEMBER_TIMEOUT_S},
            "learner": {
                "group_size": self.group_size,
                "groups_per_step": self.groups_per_step,
                "steps": self.steps,
                "max_staleness": self.steps,
            },
        }


class Server:
    """One buffer in its own process, over a folder that outlives it."""

    def __init__(self, folder: Path, sections: RunSections) -> None:
        """`sections` but for the run's folder and the buffer's addresses, which are made here."""
        self.address, http = free_addresses(2)
        self.run_file = folder / "run.toml"
        self.journal = folder / "run" / "buffer" / "journal"
        self._log = folder / "server.log"
        folder.mkdir(parents=True, exist_ok=True)
        self.run_file.write_text(_located(sections, folder / "run", self.address, http), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start it; seconds from the start of the process until Status answers. Raises RuntimeError."""
        words = [sys.executable, "-m", "forebay.cli.main", "buffer", str(self.run_file)]
        with self._log.open("ab") as log:
            began = time.monotonic()
            self._process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        self._wait_for_listener(self._process, began + START_TIMEOUT_S)
        self.status()
        return time.monotonic() - began

    def status(self) -> control_pb2.StatusResponse:
        """What Status answers."""
        with BlockingClient(self.address) as client:
            return client.status()

    def ledger(self) -> experience_pb2.LedgerResponse:
        """What Ledger answers."""
        with BlockingClient(self.address) as client:
            return client.ledger()

    def kill(self) -> None:
        """SIGKILL to it and to what makes its snapshots, and wait for the end of all."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            while True:  # a snapshot's maker is no child of ours to wait for
                os.killpg(self._process.pid, 0)
                time.sleep(0.005)
        except ProcessLookupError:
            return

    def stop(self) -> None:
        """SIGTERM, and wait for the end."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    def cpu_s(self) -> float:
        """Processor seconds that it has used since its start, all threads together."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self, field: str = "VmRSS") -> float:
        """Resident memory now, or at its peak with `VmHWM`."""
        lines = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024

    def _wait_for_listener(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        host, _, port = self.address.rpartition(":")
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the buffer ended with {process.returncode}: {self._last_words()}")
            try:
                socket.create_connection((host, int(port)), timeout=1.0).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def _last_words(self) -> str:
        return " | ".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])


@contextmanager
def serving(folder: Path, sections: RunSections) -> Iterator[Server]:
    """A fresh buffer for the time of the body; then it is killed and its folder removed."""
    server = Server(folder, sections)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)


def _located(sections: RunSections, home: Path, address: str, http: str) -> str:
    places = {"run": {"folder": str(home)}, "buffer": {"listen": address, "http": http}}
    return toml_text({**sections, **{name: {**sections.get(name, {}), **keys} for name, keys in places.items()}})
