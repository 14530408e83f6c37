"""History from the wire and from the learner's file, and the PNG that is drawn from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.obs.history import from_metrics_file, from_response
from forebay.obs.plot import draw
from forebay.wire.v1 import control_pb2
from tests.core.statuses import evaluated

PNG = b"\x89PNG"


def metrics(step: int) -> dict[str, object]:
    """As the learner commits them."""
    seconds = {"forward": 1.0, "wait_buffer": step / 10}
    return {"reward_mean": step / 40, "kl": 1e-3, "generated_tokens": 100, "tokens_per_s": 90.0, "seconds": seconds}


def response(steps: int) -> control_pb2.HistoryResponse:
    """A history with two held-out scores."""
    records = [
        control_pb2.StepRecord(step=step, metrics_json=json.dumps(metrics(step))) for step in range(1, steps + 1)
    ]
    return control_pb2.HistoryResponse(steps=records, evals=[evaluated(0, 0.2), evaluated(steps, 0.9)])


def test_history_from_the_wire() -> None:
    history = from_response(response(10))
    assert [point.step for point in history.steps] == list(range(1, 11))
    assert history.total("generated_tokens") == 1000
    assert history.seconds_by_cause() == {"forward": 10.0, "wait_buffer": pytest.approx(5.5)}
    assert str(history.evals[-1]) == "0.900 ± 0.020"


def test_a_score_measured_again_counts_once() -> None:
    answer = control_pb2.HistoryResponse(evals=[evaluated(5, 0.2, incarnation=1), evaluated(5, 0.3, incarnation=2)])
    assert [point.score for point in from_response(answer).evals] == [0.3]


def test_history_from_a_file_with_a_repeated_step_and_a_torn_line(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "reward_mean": reward}) for step, reward in ((1, 0.1), (2, 0.2), (2, 0.3))]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "rew']))
    history = from_metrics_file(tmp_path / "metrics.jsonl")
    assert [(point.step, point.number("reward_mean")) for point in history.steps] == [(1, 0.1), (2, 0.3)]
    assert history.steps[0].number("kl") is None


@pytest.mark.parametrize("steps", [1, 40])
def test_a_png_is_drawn(tmp_path: Path, steps: int) -> None:
    path = draw(from_response(response(steps)), tmp_path / "plots" / "x.png", "small")
    assert path.read_bytes().startswith(PNG)


def test_a_long_first_step_is_cut_off_and_told(tmp_path: Path) -> None:
    answer = response(5)
    answer.steps[0].metrics_json = json.dumps({"seconds": {"wait_buffer": 90.0}})
    assert draw(from_response(answer), tmp_path / "x.png", "small").read_bytes().startswith(PNG)


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to plot yet"):
        draw(from_response(control_pb2.HistoryResponse()), tmp_path / "x.png", "small")
