"""One run's services as processes of their own, each on the cores that it is given, and how fast they get on."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forebay.buffer.client import BlockingClient
from forebay.loopback import free_addresses
from forebay.wire.v1 import common_pb2, control_pb2

ROOT = Path(__file__).parents[1]
POLL_S = 0.02
START_DEADLINE_S, DEADLINE_S, END_DEADLINE_S = 60.0, 1800.0, 30.0


class Services:
    """`forebay buffer`, `learner` and `sampler` of one run file; what is left of them ends with the `with`."""

    def __init__(self, folder: Path, run_file: Path, flags: Sequence[str]) -> None:
        self._folder = folder
        self._address, http = free_addresses(2)
        places = (f"--run.folder={folder / 'run'}", f"--buffer.listen={self._address}", f"--buffer.http={http}")
        self._words = [str(run_file), *places, *flags]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Services:
        self._folder.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes.values()):  # the buffer last: the others take leave of it
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, command: str, cores: Sequence[int]) -> None:
        """`forebay COMMAND` on these cores, its output in COMMAND.log."""
        pinned = ["taskset", "--cpu-list", ",".join(map(str, cores))]
        with (self._folder / f"{command}.log").open("ab") as log:
            words = [*pinned, sys.executable, "-m", "forebay.cli.main", command, *self._words]
            self._processes[command] = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)

    def hold(self, command: str) -> None:
        """Stop its process where it is, until `go_on`."""
        self._processes[command].send_signal(signal.SIGSTOP)

    def go_on(self, command: str) -> None:
        """Undo `hold`."""
        self._processes[command].send_signal(signal.SIGCONT)

    def until(self, condition: Callable[[control_pb2.StatusResponse], bool]) -> float:
        """When the buffer's status first met `condition`, on the monotonic clock. Raises RuntimeError."""
        deadline_s = time.monotonic() + DEADLINE_S
        with self._client() as client:
            while not condition(client.status()):
                self._check(deadline_s)
                time.sleep(POLL_S)
        return time.monotonic()

    def _client(self) -> BlockingClient:
        host, _, port = self._address.rpartition(":")
        deadline_s = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1.0).close()
            except OSError:
                self._check(deadline_s)
                time.sleep(POLL_S)
            else:
                return BlockingClient(self._address)

    def _check(self, deadline_s: float) -> None:
        for command, process in self._processes.items():
            if process.poll():
                log = (self._folder / f"{command}.log").read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"{command} ended with {process.returncode}: {' | '.join(log.splitlines()[-3:])}")
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{self._folder}: the services do not get on")


def produced(status: control_pb2.StatusResponse) -> int:
    """Groups that all samplers have delivered."""
    return sum(member.groups for member in status.members if member.member.role == common_pb2.ROLE_SAMPLER)
