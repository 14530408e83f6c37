"""What asynchrony gains: `python -m benchmarks.async_efficiency [--quick] [--only EXAMPLE] [--section.key=value ...]`.

The sampler has one core, the learner another one. First each works alone: the samplers' whole experience is generated
while the learner stands still, then trained with nothing to wait for. The slower of the two is what an asynchronous
run can reach at best, their sum what a run that takes turns needs. Then the same run asynchronously (the run file's
staleness) and synchronously (staleness 0). Without `--quick` with SmolLM2-135M too. Dotted flags go to every service.
Progress goes to standard error; the last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.services import ROOT, Services, produced
from forebay.config.load import load
from forebay.config.model_source import model_source
from forebay.wire.v1 import control_pb2

SAMPLER_CORES, LEARNER_CORES, BUFFER_CORES = (0,), (1,), (0, 1)
STEPS = {"quickstart": 30, "smollm2": 8}
WARM_UP_STEPS = 2


def main(argv: Sequence[str]) -> int:
    """Measure, print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_efficiency", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny model only")
    parser.add_argument("--only", choices=STEPS, help="this example alone")
    arguments, flags = parser.parse_known_args(argv)
    examples = [arguments.only] if arguments.only else ["quickstart"] if arguments.quick else list(STEPS)
    with tempfile.TemporaryDirectory(prefix="forebay-async-", dir=ROOT.parent) as scratch:
        found = {example: measure(example, Path(scratch), flags) for example in examples}
    print(json.dumps(found))
    return 0


def measure(example: str, folder: Path, more: Sequence[str]) -> dict[str, Any]:
    """Seconds a step: generation alone, training alone, both at once, and in turn."""
    steps, run_file = STEPS[example], ROOT / "examples" / f"{example}.toml"
    model_source(load([run_file], {}).model, 0)  # made now, if it has to be
    flags = [f"--learner.steps={steps}", "--learner.checkpoint_every_steps=1000", "--buffer.member_timeout_s=3600"]
    flags += ["--task.heldout_prompts=0", *more]
    generation_s, training_s = _alone(Services(folder / f"{example}-alone", run_file, [*flags, _stale(steps)]), steps)
    told = {"generation_step_s": generation_s, "training_step_s": training_s}
    async_s = _together(Services(folder / f"{example}-async", run_file, flags), steps)
    sync_s = _together(Services(folder / f"{example}-sync", run_file, [*flags, _stale(0)]), steps)
    told |= {"async_step_s": async_s, "sync_step_s": sync_s}
    print(f"async_efficiency: {example}: {told}", file=sys.stderr, flush=True)
    return {
        **{name: round(seconds, 3) for name, seconds in told.items()},
        "share_of_ideal": round(max(generation_s, training_s) / async_s, 3),
        "gain_vs_sync": round(sync_s / async_s, 2),
        "ideal_gain_vs_sync": round((generation_s + training_s) / max(generation_s, training_s), 2),
    }


def _alone(services: Services, steps: int) -> tuple[float, float]:
    """Seconds a step of generation while the learner stands still, and of training with all experience there."""
    with services:
        services.start("buffer", BUFFER_CORES)
        services.start("learner", LEARNER_CORES)
        services.until(lambda status: status.HasField("newest"))
        services.hold("learner")
        services.start("sampler", SAMPLER_CORES)
        generation_s = _seconds_a_step(services, steps, _generated)
        services.go_on("learner")
        return generation_s, _seconds_a_step(services, steps, lambda status: status.step)


def _together(services: Services, steps: int) -> float:
    """Seconds a step of a whole run."""
    with services:
        services.start("buffer", BUFFER_CORES)
        services.start("learner", LEARNER_CORES)
        services.start("sampler", SAMPLER_CORES)
        return _seconds_a_step(services, steps, lambda status: status.step)


def _generated(status: control_pb2.StatusResponse) -> float:
    """How many steps' experience has been delivered."""
    groups_per_step: int = json.loads(status.run_json)["learner"]["groups_per_step"]
    return produced(status) / groups_per_step


def _seconds_a_step(services: Services, steps: int, done: Callable[[control_pb2.StatusResponse], float]) -> float:
    """From the end of the warm-up to the last step but one: the last one also saves a checkpoint."""
    first, last = WARM_UP_STEPS, steps - 1
    began = services.until(lambda status: done(status) >= first)
    return (services.until(lambda status: done(status) >= last) - began) / (last - first)


def _stale(steps: int) -> str:
    return f"--learner.max_staleness={steps}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
