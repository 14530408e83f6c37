"""Real `forebay` processes, as somebody would start and kill them in shells, and what the buffer says of them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from forebay.buffer.client import BufferClient
from forebay.loopback import free_addresses
from forebay.wire.v1 import common_pb2, control_pb2

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.3


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    return [int(address.rpartition(":")[2]) for address in free_addresses(count)]


class Shells:
    """Processes by name, all of one run; what is left of them ends with the `with`."""

    def __init__(self, folder: Path, run_file: Path, flags: Sequence[str]) -> None:
        grpc, http = free_ports(2)
        self.address, self.home = f"127.0.0.1:{grpc}", folder / "run"
        self._folder = folder
        self._words = [
            str(run_file),
            f"--run.folder={self.home}",
            f"--buffer.listen={self.address}",
            f"--buffer.http=127.0.0.1:{http}",
            *flags,
        ]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Shells:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def start(self, name: str, command: str, *more: str) -> None:
        """`forebay COMMAND`; its output is appended to NAME.log."""
        with (self._folder / f"{name}.log").open("ab") as log:
            words = [sys.executable, "-m", "forebay.cli.main", command, *self._words, *more]
            self.processes[name] = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """kill -9, and gone."""
        self.processes[name].kill()
        assert self.processes[name].wait() == -signal.SIGKILL

    def log(self, name: str) -> str:
        """What the process has printed."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def children(self, command: str) -> list[int]:
        """Processes of this run that `forebay run` started for `COMMAND`."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                except OSError:
                    continue
                if command in words and f"--run.folder={self.home}" in words and "-m" in words:
                    found.append(int(entry.name))
        return found

    async def until(
        self, condition: Callable[[control_pb2.StatusResponse], bool], watch: Watch, deadline_s: float
    ) -> control_pb2.StatusResponse:
        """The first status that meets `condition`; every status on the way goes to `watch`."""
        async with asyncio.timeout(deadline_s), BufferClient(self.address) as client:
            while True:
                for name, process in self.processes.items():
                    assert process.poll() in (None, 0, -signal.SIGKILL), f"{name} failed:\n{self.log(name)[-3000:]}"
                status = await client.status()
                watch.see(status)
                if condition(status):
                    return status
                await asyncio.sleep(POLL_S)  # a poll of another process: there is nothing to be notified by


class Watch:
    """What was seen over a whole run."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.samplers: set[str] = set()
        self.installed: set[tuple[int, int]] = set()

    def see(self, status: control_pb2.StatusResponse) -> None:
        """Take one status in; fails when a sampler serves other weights than the learner published."""
        self.steps.append(status.step)
        for member in status.members:
            if member.member.role == common_pb2.ROLE_SAMPLER:
                self.samplers.add(member.member.id)
                if member.HasField("version") and member.version == status.newest and member.digest:
                    assert member.digest == status.newest_digest, f"{member.member.id} drifted"
                    self.installed.add((member.version.incarnation, member.version.step))
