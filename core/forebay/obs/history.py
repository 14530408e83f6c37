"""What a run has done so far: metrics of each step and held-out scores, for plots and summaries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.wire.v1 import control_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One trained step: its number and the metrics that the learner committed with it."""

    step: int
    metrics: Mapping[str, Any]

    def number(self, key: str) -> float | None:
        """The metric, or None where the learner did not give it."""
        value = self.metrics.get(key)
        return float(value) if isinstance(value, int | float) else None

    @property
    def seconds(self) -> dict[str, float]:
        """Wall seconds by cause."""
        return {str(cause): float(s) for cause, s in (self.metrics.get("seconds") or {}).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPoint:
    """A held-out score: mean exact match or reward, 0 to 1, and its standard error."""

    step: int
    score: float
    stderr: float
    prompts: int

    def __str__(self) -> str:
        return f"{self.score:.3f} ± {self.stderr:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Steps and held-out scores, each in order of steps; a step that was trained again counts once, its last time."""

    steps: tuple[StepPoint, ...]
    evals: tuple[EvalPoint, ...]

    def total(self, key: str) -> float:
        """Sum of a metric over the steps."""
        return sum(point.number(key) or 0.0 for point in self.steps)

    def seconds_by_cause(self) -> dict[str, float]:
        """The learner's wall seconds by cause, over all steps."""
        total: dict[str, float] = {}
        for point in self.steps:
            for cause, seconds in point.seconds.items():
                total[cause] = total.get(cause, 0.0) + seconds
        return total


def from_response(response: control_pb2.HistoryResponse) -> History:
    """What the buffer answers."""
    steps = {
        record.step: StepPoint(step=record.step, metrics=json.loads(record.metrics_json or "{}"))
        for record in response.steps
    }
    return History(steps=_ordered(steps.values()), evals=eval_points(response.evals))


def from_metrics_file(path: Path) -> History:
    """What the learner wrote, `learner/metrics.jsonl`; a torn last line is left out. Raises OSError."""
    steps: dict[int, StepPoint] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            metrics = json.loads(line)
            steps[int(metrics["step"])] = StepPoint(step=int(metrics["step"]), metrics=metrics)
        except (ValueError, KeyError, TypeError):
            continue  # a killed learner leaves half a line
    return History(steps=_ordered(steps.values()), evals=())


def eval_points(results: Iterable[control_pb2.EvalResult]) -> tuple[EvalPoint, ...]:
    """Held-out scores in order of steps, the newest of each step."""
    by_step = {
        result.version.step: EvalPoint(
            step=result.version.step, score=result.score, stderr=result.stderr, prompts=result.prompts
        )
        for result in results
    }
    return tuple(by_step[step] for step in sorted(by_step))


def _ordered(steps: Iterable[StepPoint]) -> tuple[StepPoint, ...]:
    return tuple(sorted(steps, key=lambda point: point.step))
