"""A run as one PNG: what it learned, how stale and how far off it was, where the time went."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.obs.history import History

WIDTH_IN, HEIGHT_IN, DPI = 13.0, 8.0, 110
INK, SOFT, ACCENT, WARM = "#22313f", "#b8c4ce", "#1f77b4", "#d9772b"
SMOOTH_STEPS = 5


def draw(history: History, path: Path, title: str) -> Path:
    """Write the PNG; returns its path. Raises UsageError when there is nothing to draw or no matplotlib."""
    if not history.steps:
        raise UsageError(f"nothing to plot yet: no step of {title} is committed")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('plots need matplotlib: pip install "forebay[observe]"')
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it keeps global state and may look for a display.
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, color=INK, fontsize=14)
    axes = figure.subplots(2, 3).flat
    for axis, panel in zip(axes, (_reward, _heldout, _staleness, _kl, _throughput, _seconds), strict=True):
        panel(axis, history)
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return path


def _reward(axis: Any, history: History) -> None:
    axis.set_title("reward (training)")
    _line(axis, history, "reward_mean", ACCENT, smooth=True)


def _heldout(axis: Any, history: History) -> None:
    axis.set_title("held-out score")
    steps = [point.step for point in history.evals]
    scores = [point.score for point in history.evals]
    errors = [point.stderr for point in history.evals]
    axis.errorbar(steps, scores, yerr=errors, color=WARM, marker="o", capsize=3)
    axis.set_ylim(-0.02, 1.02)
    if not steps:
        axis.text(0.5, 0.5, "not evaluated", transform=axis.transAxes, ha="center", color=SOFT)


def _staleness(axis: Any, history: History) -> None:
    axis.set_title("staleness (steps)")
    _line(axis, history, "staleness_max", SOFT, label="oldest")
    _line(axis, history, "staleness_mean", ACCENT, label="mean")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)


def _kl(axis: Any, history: History) -> None:
    axis.set_title("KL behaviour → learner, |ratio − 1|")
    _line(axis, history, "kl", ACCENT, label="KL (k3)")
    _line(axis, history, "ratio_minus_1", WARM, label="mean |ratio − 1|")
    axis.legend(frameon=False)


def _throughput(axis: Any, history: History) -> None:
    axis.set_title("throughput (trained tokens/s)")
    _line(axis, history, "tokens_per_s", ACCENT, smooth=True)
    axis.set_ylim(bottom=0)


def _seconds(axis: Any, history: History) -> None:
    axis.set_title("learner's seconds a step, by cause")
    causes = [cause for cause, total in history.seconds_by_cause().items() if total > 0]
    steps = [point.step for point in history.steps]
    if causes:
        rows = [[point.seconds.get(cause, 0.0) for point in history.steps] for cause in causes]
        axis.stackplot(steps, rows, labels=causes, alpha=0.85)
        axis.legend(frameon=False, fontsize=8, ncols=2)
        _cut_first(axis, history)


def _cut_first(axis: Any, history: History) -> None:
    """The first step waits for engines to start: without a cut, nothing else could be seen."""
    totals = [sum(point.seconds.values()) for point in history.steps]
    if len(totals) > 1 and totals[0] > 2 * max(totals[1:]):
        axis.set_ylim(0, 1.5 * max(totals[1:]))
        axis.annotate(f"↑ {totals[0]:.0f} s", (0.02, 0.94), xycoords="axes fraction", color=INK)


def _line(axis: Any, history: History, key: str, color: str, *, label: str | None = None, smooth: bool = False) -> None:
    found = [(point.step, value) for point in history.steps if (value := point.number(key)) is not None]
    steps, values = [step for step, _ in found], [value for _, value in found]
    if smooth and len(values) > 2 * SMOOTH_STEPS:
        axis.plot(steps, values, color=SOFT, linewidth=1)
        values = _smoothed(values)
    marker = "." if len(values) < 30 else None
    axis.plot(steps, values, color=color, label=label, marker=marker)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean over the last few steps."""
    windows = [values[max(0, end - SMOOTH_STEPS) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]
