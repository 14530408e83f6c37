"""A buffer, a learner and samplers, each in a process of its own, and what they did in a measured phase."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.buffer_load.commands import LoadProcess, ask_all, span_s
from benchmarks.buffer_load.server import RunShape, Server


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What was done, by all processes together, between the first one's start and the last one's end."""

    rows: int
    bytes: int
    seconds: float
    latencies_ms: list[float]  #: sorted
    server_cores: float  #: processor seconds of the server a second

    @property
    def rows_s(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds

    @property
    def mb_s(self) -> float:
        """Payload megabytes (10⁶) a second."""
        return self.bytes / self.seconds / 1e6

    def latency_ms(self, share: float) -> float:
        """The latency that a share of all operations stayed within."""
        return self.latencies_ms[min(len(self.latencies_ms) - 1, int(share * len(self.latencies_ms)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Who takes part. Samplers' processes may hold several members each."""

    server: Server
    learner: LoadProcess
    samplers: Sequence[LoadProcess]
    members: int

    def append(self, frames: int, groups_a_frame: int, row_bytes: int, in_flight: int) -> Phase:
        """Every member appends `frames` frames; the permits are fetched before the clock starts."""
        ask_all(self.samplers, "admit", groups=frames * groups_a_frame)
        return self.measured(
            self.samplers,
            "append",
            frames=frames,
            groups_a_frame=groups_a_frame,
            row_bytes=row_bytes,
            in_flight=in_flight,
        )

    def train(self, steps: int) -> Phase:
        """The learner leases and commits the next `steps` steps."""
        return self.measured([self.learner], "train", steps=steps)

    def dismiss(self) -> None:
        """End the load processes; the server stays."""
        for process in (self.learner, *self.samplers):
            process.end()

    def measured(self, processes: Sequence[LoadProcess], do: str, **arguments: Any) -> Phase:
        """Have all processes do it at once."""
        cpu_s = self.server.cpu_s()
        answers = ask_all(processes, do, **arguments)
        return phase(answers, self.server.cpu_s() - cpu_s)


def phase(answers: Sequence[Mapping[str, Any]], server_cpu_s: float) -> Phase:
    """What the answers of load processes add up to."""
    seconds = span_s(answers)
    return Phase(
        rows=sum(answer["rows"] for answer in answers),
        bytes=sum(answer["bytes"] for answer in answers),
        seconds=seconds,
        latencies_ms=sorted(latency for answer in answers for latency in answer["latencies_ms"]),
        server_cores=round(server_cpu_s / seconds, 2),
    )


@contextmanager
def site(folder: Path, shape: RunShape, *, processes: int = 1, members_each: int = 1) -> Iterator[Site]:
    """A fresh run with its weights published and its samplers joined; afterwards killed and removed."""
    server = Server(folder, shape.run_file())
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        stack.callback(server.kill)
        learner = stack.enter_context(LoadProcess("benchmarks.buffer_load.learner", str(server.run_file)))
        samplers = [
            stack.enter_context(LoadProcess("benchmarks.buffer_load.sampler", str(server.run_file)))
            for _ in range(processes)
        ]
        server.start()
        learner.ask("start")
        for number, process in enumerate(samplers):
            process.tell("join", names=[f"s{number}-{member}" for member in range(members_each)])
        for process in samplers:
            process.hear()
        yield Site(server=server, learner=learner, samplers=samplers, members=processes * members_each)
