"""Run a run file with `forebay run`, as a user would, and read what it left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.loopback import free_addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class OurRun:
    """A finished run. `seconds`: wall time of the whole command, the start of the services included. Scores: 0 to 1."""

    seconds: float
    score_before: float | None
    score_after: float | None
    ledger_balanced: bool
    steps: list[dict[str, Any]]  #: the learner's metrics, a dict a step
    sampler_wait_share: float | None


def run(run_file: Path, flags: Sequence[str], home: Path) -> OurRun:
    """Run it from scratch in `home`. Raises RuntimeError with the last lines when it does not end well."""
    shutil.rmtree(home, ignore_errors=True)
    listen, http = free_addresses(2)
    where = [f"--run.folder={home}", f"--buffer.listen={listen}", f"--buffer.http={http}"]
    arguments = [str(run_file), *flags, *where]
    started = time.monotonic()
    _forebay("run", arguments)
    seconds = time.monotonic() - started
    ledger = json.loads(_forebay("ledger", [*arguments, "--json"]))
    summary = json.loads((home / "summary.json").read_text(encoding="utf-8"))
    return OurRun(
        seconds=seconds,
        score_before=summary["score_before"],
        score_after=summary["score_after"],
        ledger_balanced=bool(ledger["balanced"]),
        steps=_metrics(home / "learner" / "metrics.jsonl"),
        sampler_wait_share=summary["sampler_wait_share"],
    )


def make_model(run_file: Path, flags: Sequence[str]) -> None:
    """Make or find the run file's model. Raises RuntimeError."""
    _forebay("config", ["model", str(run_file), *flags])


def step_seconds(step: dict[str, Any]) -> float:
    """Wall seconds of a step: its causes add up to them."""
    return float(sum(step["seconds"].values()))


def _metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _forebay(command: str, arguments: Sequence[str]) -> str:
    """Standard output of a command; what it says besides passes through to standard error while it runs."""
    words = [sys.executable, "-m", "forebay.cli.main", command, *arguments]
    lines: list[str] = []
    joined = subprocess.STDOUT if command == "run" else None
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=joined, text=True, env=_environment()) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if command == "run":
                print(f"ours: {line}", end="", file=sys.stderr, flush=True)
    if process.returncode:
        raise RuntimeError(f"forebay {command} ended with {process.returncode}: {' | '.join(lines[-3:])}")
    return "".join(lines)


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1"}
