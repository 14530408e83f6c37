"""Weights from the learner into working samplers: `python -m benchmarks.weight_sync [--quick] [--only SECTION ...]`.

The publisher, the receiver and vLLM are those of `forebay learner` and `forebay sampler`; the buffer is a process of
its own. Without `--quick` the model is SmolLM2-135M and, under `tiny`, the quickstart's; with it only the latter.
Progress goes to standard error; the last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.weight_load.example import ROOT, SMOLLM2, TINY, Example
from benchmarks.weight_load.fanout import fan_out
from forebay.cli.threads import settle_own_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of everything is measured."""

    versions: int  #: published in a row
    rounds: int  #: of windows of generation
    receivers: int
    fan_out_versions: int


FULL = Plan(versions=20, rounds=3, receivers=50, fan_out_versions=20)
QUICK = Plan(versions=8, rounds=1, receivers=50, fan_out_versions=3)


def publishing(plan: Plan, example: Example, folder: Path) -> dict[str, Any]:
    """What of a publication stops training."""
    from benchmarks.weight_load.publishing import publishing  # torch: not before its threads are settled

    return publishing(example, folder, plan.versions)


def installing(plan: Plan, example: Example, folder: Path) -> dict[str, Any]:
    """What of an update stops generation."""
    from benchmarks.weight_load.installing import installing  # torch again

    return installing(example, folder, plan.rounds)


SECTIONS: dict[str, Callable[[Plan, Example, Path], dict[str, Any]]] = {
    "publishing": publishing,
    "installing": installing,
    "fan_out": lambda plan, example, folder: fan_out(folder, plan.receivers, plan.fan_out_versions),
}


def main(argv: Sequence[str]) -> int:
    """Measure, print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_sync", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny model only, once")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--rounds", type=int, metavar="N", help="windows of generation of each kind; default 3")
    arguments = parser.parse_args(argv)
    settle_own_threads()  # as many as a learner or a sampler has
    plan = QUICK if arguments.quick else FULL
    plan = replace(plan, rounds=arguments.rounds or plan.rounds)
    with tempfile.TemporaryDirectory(prefix="forebay-weights-", dir=ROOT.parent) as scratch:
        found = measure(plan, TINY if arguments.quick else SMOLLM2, Path(scratch), arguments.only)
        if not arguments.quick:
            tiny = measure(plan, TINY, Path(scratch), [name for name in arguments.only if name != "fan_out"])
            found["tiny"] = tiny
    print(json.dumps(found))
    return 0


def measure(plan: Plan, example: Example, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """The figures of the named sections in one object."""
    found: dict[str, Any] = {"model": example.file.removesuffix(".toml")}
    for name in names:
        began = time.monotonic()
        figures = SECTIONS[name](plan, example, folder)
        print(f"weight_sync: {name} ({time.monotonic() - began:.1f} s): {figures}", file=sys.stderr, flush=True)
        found |= figures
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
