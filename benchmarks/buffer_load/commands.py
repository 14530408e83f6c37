"""Load processes and how they are told what to do: a JSON object a line each way, over standard input and output."""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

Operation = Callable[..., Awaitable[dict[str, Any]]]


class LoadFailed(RuntimeError):
    """A load process could not do what it was told."""


async def obey(operations: Mapping[str, Operation]) -> None:
    """Do what standard input says, one command after the other, until it ends; answer each on standard output."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        try:
            answer = await operations[command.pop("do")](**command)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


class LoadProcess:
    """A process that obeys. `module` is run with this interpreter, its words after the module's name."""

    def __init__(self, module: str, *words: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *words], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> LoadProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill it, unless it has ended."""
        self._process.kill()
        self._process.wait()

    def tell(self, do: str, **arguments: Any) -> None:
        """Send a command; `hear` gets the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do} | arguments).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, timeout_s: float = 600.0) -> dict[str, Any]:
        """The answer to the last command. Raises LoadFailed, also when there is none in time."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise LoadFailed(f"{self._module}: no answer within {timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise LoadFailed(f"{self._module} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LoadFailed(f"{self._module}: {answer['error']}")
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises LoadFailed."""
        self.tell(do, **arguments)
        return self.hear()


def span_s(answers: Iterable[Mapping[str, Any]]) -> float:
    """Seconds from the first process's start to the last one's end: all share the machine's monotonic clock."""
    told = list(answers)
    return float(max(answer["ended_s"] for answer in told) - min(answer["began_s"] for answer in told))


def ask_all(processes: Iterable[LoadProcess], do: str, **arguments: Any) -> list[dict[str, Any]]:
    """The same command to all at once; their answers. Raises LoadFailed."""
    told = list(processes)
    for process in told:
        process.tell(do, **arguments)
    return [process.hear() for process in told]
