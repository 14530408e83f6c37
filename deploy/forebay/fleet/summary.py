"""What a run came to: printed at its end, kept in the run folder, printed again when asked."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.buffer.conservation import balanced
from forebay.config.checkpoints import complete_steps, folder_of, name_of
from forebay.config.identity import differences, run_json
from forebay.config.models import RunFile
from forebay.errors import UsageError
from forebay.obs.history import EvalPoint, History
from forebay.obs.view import human_bytes, share
from forebay.wire.v1 import control_pb2, experience_pb2

FILE = "summary.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in figures. Scores are 0 to 1; shares 0 to 1 of wall time; `seconds` is of the last `forebay run`."""

    run: str
    run_json: str
    finished: bool
    step: int
    steps: int
    seconds: float
    score_before: float | None
    score_before_stderr: float | None
    score_after: float | None
    score_after_stderr: float | None
    heldout_prompts: int
    trained_tokens: int
    tokens_per_s: float
    learner_wait_share: float | None
    sampler_wait_share: float | None
    ledger_balanced: bool
    weight_bytes_published: int
    weight_bytes_full: int
    plot: str | None
    checkpoint: str | None


def summarize(
    run: RunFile,
    status: control_pb2.StatusResponse,
    history: History,
    ledger: experience_pb2.LedgerResponse,
    *,
    seconds: float,
    sampler_wait_share: float | None,
    plot: Path | None,
) -> Summary:
    """Put together what the buffer answered."""
    causes = history.seconds_by_cause()
    learner_s = sum(causes.values())
    tokens = int(history.total("generated_tokens"))
    before, after = _first_and_last(history.evals)
    return Summary(
        run=run.run.name,
        run_json=run_json(run),
        finished=status.state == "finished",
        step=status.step,
        steps=status.steps,
        seconds=seconds,
        score_before=before.score if before else None,
        score_before_stderr=before.stderr if before else None,
        score_after=after.score if after else None,
        score_after_stderr=after.stderr if after else None,
        heldout_prompts=after.prompts if after else before.prompts if before else 0,
        trained_tokens=tokens,
        tokens_per_s=tokens / learner_s if learner_s else 0.0,
        learner_wait_share=causes.get("wait_buffer", 0.0) / learner_s if learner_s else None,
        sampler_wait_share=sampler_wait_share,
        ledger_balanced=balanced(ledger),
        weight_bytes_published=status.weight_bytes_published,
        weight_bytes_full=status.weight_bytes_full,
        plot=str(plot) if plot else None,
        checkpoint=_last_checkpoint(run.run.home),
    )


def in_words(summary: Summary) -> list[str]:
    """The lines that are printed."""
    ended = "finished" if summary.finished else "stopped; the same command goes on from its last checkpoint"
    waits = (("learner", summary.learner_wait_share), ("samplers", summary.sampler_wait_share))
    waited = ", ".join(f"{who} {100 * part:.0f} %" for who, part in waits if part is not None) or "not known"
    sent, full = summary.weight_bytes_published, summary.weight_bytes_full
    rows = (
        ("run", f"{summary.run}: step {summary.step} of {summary.steps}, {ended}"),
        ("held-out score", _scores(summary)),
        ("time", f"{summary.seconds:.0f} s, {summary.trained_tokens} tokens trained, {summary.tokens_per_s:.0f} tok/s"),
        ("waited", waited),
        ("ledger", "balanced" if summary.ledger_balanced else "NOT BALANCED: see forebay ledger"),
        ("weights", f"{human_bytes(sent)} published, {share(sent, full)} of the {human_bytes(full)} of full copies"),
        ("plot", summary.plot or "none"),
        ("checkpoint", summary.checkpoint or "none yet"),
    )
    return [f"{name:<15} {words}" for name, words in rows]


def store(summary: Summary, home: Path) -> None:
    """Write it into the run folder, whole or not at all."""
    partial = home / f".{FILE}.{os.getpid()}"
    partial.write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n", encoding="utf-8")
    partial.replace(home / FILE)


def finished_before(run: RunFile) -> Summary | None:
    """The summary of this very run, if it is finished. Raises UsageError when another run is finished in its folder."""
    try:
        known: dict[str, Any] = json.loads((run.run.home / FILE).read_text(encoding="utf-8"))
        summary = Summary(**known)
    except (OSError, ValueError, TypeError):
        return None
    if not summary.finished:
        return None
    differing = differences(summary.run_json, run_json(run))
    if differing:
        raise UsageError(
            f"run folder {run.run.home}: holds a finished run with other settings ({'; '.join(differing)}); "
            "give this one another run.name, or start over with --fresh"
        )
    return summary


def _first_and_last(evals: tuple[EvalPoint, ...]) -> tuple[EvalPoint | None, EvalPoint | None]:
    first = evals[0] if evals and evals[0].step == 0 else None
    last = evals[-1] if evals and evals[-1].step > 0 else None
    return first, last


def _scores(summary: Summary) -> str:
    before = _score(summary.score_before, summary.score_before_stderr)
    after = _score(summary.score_after, summary.score_after_stderr)
    return f"{before} → {after} ({summary.heldout_prompts} prompts)"


def _score(score: float | None, stderr: float | None) -> str:
    return f"{score:.3f} ± {stderr:.3f}" if score is not None and stderr is not None else "not measured"


def _last_checkpoint(home: Path) -> str | None:
    steps = complete_steps(home)
    return str(folder_of(home) / name_of(steps[-1])) if steps else None
