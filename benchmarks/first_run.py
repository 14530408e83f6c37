"""The first run beside its synchronous peer: `python -m benchmarks.first_run [--quick]`.

Both sides train the same model on the same task on this machine, with the same groups, updates a step, learning rate
and temperature: ours as three services, TRL's GRPO trainer as one loop (`benchmarks.peer_trl`), one after the other.
Speed is trained trajectories a second, counted from the step at which ours has used up the head start that its buffer
gives it.
Progress goes to standard error; the last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ours
from forebay.config.load import load
from forebay.config.models import RunFile

ROOT = Path(__file__).parents[1]
PEER_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run of one example. Steps 0: as many as its run file says."""

    example: Path
    flags: tuple[str, ...]
    our_steps: int
    peer_steps: int
    peer_dtypes: tuple[str, ...]


# Quick: a model made beforehand, few steps, one dtype (the faster one for TRL on a CPU without AMX).
QUICK = Plan(
    example=ROOT / "examples" / "quickstart.toml",
    flags=("--run.name=bench", "--task.heldout_prompts=100"),
    our_steps=12,
    peer_steps=6,
    peer_dtypes=("float32",),
)
TINY = Plan(
    example=ROOT / "examples" / "quickstart.toml",
    flags=("--run.name=bench",),
    our_steps=0,
    peer_steps=20,
    peer_dtypes=("float32", "bfloat16"),
)
SMOLLM2 = Plan(
    example=ROOT / "examples" / "smollm2.toml",
    flags=("--run.name=bench-smollm2",),
    our_steps=0,
    peer_steps=5,
    peer_dtypes=("float32", "bfloat16"),
)


def main(argv: Sequence[str]) -> int:
    """Run both sides, print the figures; 1 when something failed, which then stands under `error`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps of the tiny model, under 50 s")
    quick = parser.parse_args(argv).quick
    with tempfile.TemporaryDirectory(prefix="forebay-first-run-") as scratch:
        found = tiny(QUICK if quick else TINY, Path(scratch))
        if not quick:
            found |= smollm2(SMOLLM2, Path(scratch))
    errors = [figures.pop("error") for figures in (found["tiny"], found.get("smollm2", {})) if "error" in figures]
    if errors:
        found["error"] = "; ".join(errors)
    print(json.dumps(found))
    return 1 if errors else 0


def tiny(plan: Plan, scratch: Path) -> dict[str, Any]:
    """The quickstart's figures; its model is cached in `models/` and its making is not counted."""
    plan = with_flags(plan, f"--model.path={ROOT / 'models' / 'tiny-bench'}")
    ours.make_model(plan.example, plan.flags)
    run, details = side_by_side(plan, scratch / "tiny")
    return {
        "score_before": run.score_before if run else None,
        "score_after": run.score_after if run else None,
        "seconds": round(run.seconds, 1) if run else None,
        "ledger_balanced": run.ledger_balanced if run else None,
        "tiny_speed_vs_trl": details["speed_vs_trl"],
        "tiny": details,
    }


def smollm2(plan: Plan, scratch: Path) -> dict[str, Any]:
    """The real model's figures; brings the checkpoint when it is not there."""
    subprocess.run([sys.executable, "-m", "examples.smollm2"], cwd=ROOT, check=True)
    run, details = side_by_side(plan, scratch / "smollm2")
    return {
        "smollm2_before": run.score_before if run else None,
        "smollm2_after": run.score_after if run else None,
        "speed_vs_trl": details["speed_vs_trl"],
        "smollm2": details,
    }


def side_by_side(plan: Plan, home: Path) -> tuple[ours.OurRun | None, dict[str, Any]]:
    """Ours, then the peer in each dtype; what failed is told under `error` and leaves the ratio empty."""
    run_file = load([plan.example], {}, ())
    steps = (f"--learner.steps={plan.our_steps}",) if plan.our_steps else ()
    details: dict[str, Any] = {"speed_vs_trl": None}
    try:
        run = ours.run(plan.example, [*plan.flags, *steps, "--observe.eval_every_steps=0"], home)
    except (RuntimeError, OSError) as error:
        return None, {**details, "error": f"ours: {error}"}
    details["ours"] = our_figures(run, run_file)
    peers = {dtype: peer(plan, dtype, run_file) for dtype in plan.peer_dtypes}
    details["trl"] = peers
    rates = [figures["trajectories_s"] for figures in peers.values() if "trajectories_s" in figures]
    failed = [f"trl in {dtype}: {figures['error']}" for dtype, figures in peers.items() if "error" in figures]
    if failed:
        details["error"] = "; ".join(failed)
    if rates:
        details["speed_vs_trl"] = round(details["ours"]["trajectories_s"] / max(rates), 3)
    return run, details


def our_figures(run: ours.OurRun, run_file: RunFile) -> dict[str, Any]:
    """Rates over the steady part, and where the learner's time and the samplers' went. Seconds are means a step."""
    head_start = run_file.learner.max_staleness + 1  # steps that may be generated before the first is trained
    steady = run.steps[min(head_start, len(run.steps) // 2) :]
    seconds = sum(map(ours.step_seconds, steady))
    trajectories = len(steady) * run_file.learner.groups_per_step * run_file.learner.group_size
    return {
        "trajectories_s": round(trajectories / seconds, 2),
        "generated_tokens_s": round(sum(step["generated_tokens"] for step in steady) / seconds, 1),
        "steady_steps": len(steady),
        "step_s": round(seconds / len(steady), 3),
        "step_parts_s": {cause: round(part / len(steady), 3) for cause, part in _by_cause(steady).items()},
        "learner_wait_share": round(_by_cause(steady).get("wait_buffer", 0.0) / seconds, 3),
        "sampler_wait_share": run.sampler_wait_share,
    }


def peer(plan: Plan, dtype: str, run_file: RunFile) -> dict[str, Any]:
    """TRL's figures in one dtype, or `error`."""
    words = [sys.executable, "-m", "benchmarks.peer_trl", str(plan.example), *plan.flags]
    words += [f"--steps={plan.peer_steps}", f"--dtype={dtype}"]
    try:
        answer = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PEER_TIMEOUT_S, check=True)
        steps = json.loads(answer.stdout.splitlines()[-1])["steps"]
    except (subprocess.SubprocessError, OSError, ValueError, LookupError) as error:
        return {"error": str(error)}
    return peer_figures(steps[1:])  # the first one allocates and warms caches


def peer_figures(steady: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Rates and means a step."""
    seconds = sum(step["wall_s"] for step in steady)
    generating = sum(step["generate_s"] for step in steady)
    return {
        "trajectories_s": round(sum(step["trajectories"] for step in steady) / seconds, 2),
        "generated_tokens_s": round(sum(step["generated_tokens"] for step in steady) / seconds, 1),
        "steady_steps": len(steady),
        "step_s": round(seconds / len(steady), 3),
        "generate_share": round(generating / seconds, 3),
        "reward_mean": round(statistics.fmean(step["reward_mean"] for step in steady), 3),
    }


def with_flags(plan: Plan, *flags: str) -> Plan:
    """The plan with more flags of the run file."""
    return Plan(
        example=plan.example,
        flags=(*plan.flags, *flags),
        our_steps=plan.our_steps,
        peer_steps=plan.peer_steps,
        peer_dtypes=plan.peer_dtypes,
    )


def _by_cause(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    causes = {cause for step in steps for cause in step["seconds"]}
    return {cause: sum(step["seconds"].get(cause, 0.0) for step in steps) for cause in sorted(causes)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
