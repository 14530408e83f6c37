"""The reward service's Prometheus metrics. One label: the model's name."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from forebay.reward.scorer import Problem
from forebay.wire.v1.reward_pb2 import ScoreError

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class RewardMetrics:
    """Counted as it happens."""

    def __init__(self, model: str) -> None:
        self._registry, self._model = CollectorRegistry(), model
        outcomes = Counter(
            "forebay_reward_completions",
            "Completions judged, by outcome",
            ("model", "outcome"),
            registry=self._registry,
        )
        self._outcomes = {
            kind: outcomes.labels(model, outcome_name(kind)) for kind in (None, *ScoreError.Kind.values()) if kind != 0
        }
        self._refused = self._counter("calls_refused", "Calls not taken")
        self._batches = self._counter("batches", "Forward passes")
        self._tokens = self._counter("tokens", "Tokens of texts judged")
        self._padded = self._counter("padded_tokens", "The same with padding")
        self._batch_s = self._counter("batch_seconds", "Time in forward passes")
        self._waiting = self._gauge("waiting", "Completions taken and not yet answered")
        self._serving = self._gauge("serving", "1 while the model is loaded and calls are taken")
        self._call_s = Histogram(
            "forebay_reward_call_seconds", "Time of a call", ("model",), buckets=_SECONDS, registry=self._registry
        ).labels(model)

    def text(self) -> bytes:
        """Exposition format."""
        return generate_latest(self._registry)

    def batch(self, texts: int, tokens: int, padded_tokens: int, seconds: float) -> None:
        """One forward pass."""
        self._batches.inc()
        self._tokens.inc(tokens)
        self._padded.inc(padded_tokens)
        self._batch_s.inc(seconds)

    def judged(self, outcome: float | Problem) -> None:
        """One completion is answered."""
        self._outcomes[outcome.kind if isinstance(outcome, Problem) else None].inc()

    def answered(self, seconds: float) -> None:
        """One call is."""
        self._call_s.observe(seconds)

    def refused(self) -> None:
        """One call is not taken."""
        self._refused.inc()

    def waiting(self, completions: int) -> None:
        """So many are in hand now."""
        self._waiting.set(completions)

    def serving(self, serving: bool) -> None:
        """The service's state."""
        self._serving.set(serving)

    def _counter(self, name: str, told: str) -> Counter:
        return Counter(f"forebay_reward_{name}", told, ("model",), registry=self._registry).labels(self._model)

    def _gauge(self, name: str, told: str) -> Gauge:
        return Gauge(f"forebay_reward_{name}", told, ("model",), registry=self._registry).labels(self._model)


def outcome_name(kind: ScoreError.Kind.ValueType | None) -> str:
    """The label of an outcome: `scored`, or the problem's kind."""
    return "scored" if kind is None else ScoreError.Kind.Name(kind).lower()
