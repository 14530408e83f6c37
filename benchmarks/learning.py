"""Who learns, and how old experience may be: `python -m benchmarks.learning [--quick] [--out FOLDER]`.

The quickstart's model and task, with the learner's own trainer on DeepSpeed; replies come from a stand-in of the
sampler that works in step with it, so that the age of the weights that generated a batch is exact, not what a race
made it. First six algorithms on fresh experience, then GRPO under five corrections at four ages, several seeds each.
What is finished is kept in FOLDER and not done again. `--quick` trains two cells a little.
Progress goes to standard error; the last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.buffer_load.commands import LoadProcess
from benchmarks.learning_load.cells import ALGORITHMS, STALE, Cell
from benchmarks.learning_load.lockstep import RUN_FILE
from benchmarks.learning_load.picture import draw
from forebay.config.load import load
from forebay.config.model_source import model_source

SEEDS, STEPS, WORKERS = 5, 40, 2
QUICK_STEPS = 3
WORKER = "benchmarks.learning_load.worker"
RUN_DEADLINE_S = 3600.0

Outcomes = Mapping[str, Sequence[Mapping[str, Any]]]


def main(argv: Sequence[str]) -> int:
    """Train what is not yet there, print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two cells, three steps")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), help="for outcomes.jsonl and learning.png")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    arguments = parser.parse_args(argv)
    run = load([RUN_FILE], {})
    model_source(run.model, run.run.seed)  # made now, if it has to be
    cells, seeds = (ALGORITHMS[:2], 1) if arguments.quick else (ALGORITHMS + STALE, arguments.seeds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "quick.jsonl" if arguments.quick else "outcomes.jsonl"
    outcomes = train_all(cells, seeds, QUICK_STEPS if arguments.quick else STEPS, arguments.out / name)
    if not arguments.quick:
        draw(outcomes, arguments.out / "learning.png")
    print(json.dumps(figures(outcomes)))
    return 0


def train_all(cells: Sequence[Cell], seeds: int, steps: int, kept: Path) -> Outcomes:
    """Outcomes by cell; those that `kept` holds already are taken from there."""
    kept.touch()
    known = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    done = {(outcome["cell"], outcome["seed"]) for outcome in known}
    wanted = [(cell, seed) for seed in range(seeds) for cell in cells if (cell.name, seed) not in done]
    workers = SimpleQueue[LoadProcess]()
    with ThreadPoolExecutor(WORKERS) as pool, kept.open("a", encoding="utf-8") as file:
        processes = [LoadProcess(WORKER) for _ in range(min(WORKERS, len(wanted)))]
        for process in processes:
            workers.put(process)
        try:
            for outcome in pool.map(lambda work: _train(workers, work[0], work[1], steps), wanted):
                known.append(outcome)
                print(json.dumps(outcome), file=file, flush=True)
        finally:
            for process in processes:
                process.end()
    return {cell.name: [outcome for outcome in known if outcome["cell"] == cell.name] for cell in cells}


def _train(workers: SimpleQueue[LoadProcess], cell: Cell, seed: int, steps: int) -> dict[str, Any]:
    worker, began = workers.get(), time.monotonic()
    try:
        worker.tell("train", name=cell.name, learner=dict(cell.learner), age=cell.age, seed=seed, steps=steps)
        outcome = worker.hear(RUN_DEADLINE_S)
    finally:
        workers.put(worker)
    print(f"learning: {time.monotonic() - began:.0f} s: {outcome}", file=sys.stderr, flush=True)
    return outcome


def figures(outcomes: Outcomes) -> dict[str, Any]:
    """Mean and spread of each cell's held-out score, and of its reward over all steps."""
    found: dict[str, Any] = {"seeds": max(map(len, outcomes.values()))}
    for name, runs in outcomes.items():
        found[name] = {
            "score": _mean_and_spread(run["score"] for run in runs),
            "mean_reward": _mean_and_spread(run["mean_reward"] for run in runs),
            "stopped": sum(bool(run["stopped"]) for run in runs),
        }
    return found


def _mean_and_spread(values: Iterable[float]) -> list[float]:
    told = list(values)
    return [round(statistics.mean(told), 3), round(statistics.stdev(told), 3) if len(told) > 1 else 0.0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
