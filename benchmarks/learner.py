"""The learner beside TRL's GRPO trainer on the same batches: `python -m benchmarks.learner [--quick]`.

SmolLM2-135M in float32, real ragged trajectories (`benchmarks/recordings`), one optimizer update a step on all cores.
Each side has a process of its own, by turns; a step's time is that of the steps after the first. Peak memory is the
process's. `speed_vs_trl` and `memory_vs_trl` are the worse of the two batches.
Progress goes to standard error; the last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.learner_load.recorded import CASES, ROOT
from examples import smollm2

STEPS, QUICK_STEPS, VARIANT_ROUNDS = 3, 2, 2
DEADLINE_S = 3600.0


def main(argv: Sequence[str]) -> int:
    """Measure, print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learner", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short replies only, two steps, no variants")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="weights and compute")
    arguments = parser.parse_args(argv)
    if not (ROOT / smollm2.FOLDER / "config.json").is_file():
        smollm2.bring(ROOT / smollm2.FOLDER)
    names = ["short"] if arguments.quick else list(CASES)
    steps = QUICK_STEPS if arguments.quick else STEPS
    found = {name: measure(name, arguments.dtype, steps, variants=not arguments.quick) for name in names}
    print(json.dumps({**worst(found), "dtype": arguments.dtype, **found}))
    return 0


def measure(case: str, dtype: str, steps: int, *, variants: bool) -> dict[str, Any]:
    """Both sides on one batch, and what each of our ideas brings."""
    ours = _run("ours", case, dtype, str(steps))
    trl = _run("trl", case, dtype, str(steps))
    found = {
        "speed_vs_trl": round(ours["trained_tokens_s"] / trl["trained_tokens_s"], 2),
        "memory_vs_trl": round(ours["peak_memory_mb"] / trl["peak_memory_mb"], 2),
        "ours": ours,
        "trl": trl,
    }
    if variants:
        found["forward_backward_s"] = _run("variants", case, str(VARIANT_ROUNDS))
    return found


def worst(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The keys that stand for all batches."""
    return {
        "speed_vs_trl": min(case["speed_vs_trl"] for case in found.values()),
        "memory_vs_trl": max(case["memory_vs_trl"] for case in found.values()),
        "overhead_share": max(case["ours"]["overhead_share"] for case in found.values()),
        "trained_tokens_s": min(case["ours"]["trained_tokens_s"] for case in found.values()),
    }


def _run(module: str, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.learner_load.{module}", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=DEADLINE_S, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"learner: {module} {' '.join(words)}: {figures}", file=sys.stderr, flush=True)
    return figures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
