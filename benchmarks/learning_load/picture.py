"""The outcomes as one picture: algorithms side by side, corrections over the age of the experience."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.learning_load.cells import AGES, ALGORITHMS, CORRECTIONS

TARGET = 0.9  #: of the task

Outcomes = Mapping[str, Sequence[Mapping[str, Any]]]


def draw(outcomes: Outcomes, path: Path) -> None:
    """Means and standard deviations over the seeds, as a PNG."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.4))
    names = [cell.name for cell in ALGORITHMS]
    means, spreads = _curve(outcomes, names)
    left.bar(names, means, yerr=spreads, capsize=4, color="#1f77b4")
    left.axhline(TARGET, color="#22313f", linestyle=":")
    left.set(title="fresh experience", ylabel="held-out score after 40 steps", ylim=(0, 1.02))
    left.tick_params(axis="x", rotation=30)
    for correction in CORRECTIONS:
        means, spreads = _curve(outcomes, [f"{correction}-{age}" for age in AGES])
        right.errorbar(range(len(AGES)), means, yerr=spreads, capsize=4, marker="o", label=correction)
    right.axhline(TARGET, color="#22313f", linestyle=":")
    right.set(title="experience of older weights (GRPO)", xlabel="age in steps", ylim=(0, 1.02))
    right.set_xticks(range(len(AGES)), list(map(str, AGES)))
    right.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _curve(outcomes: Outcomes, names: Sequence[str]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each cell's scores."""
    scores = [[run["score"] for run in outcomes[name]] for name in names]
    return [statistics.mean(some) for some in scores], [
        statistics.stdev(some) if len(some) > 1 else 0.0 for some in scores
    ]
