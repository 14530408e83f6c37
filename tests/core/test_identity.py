"""Which settings make a run this run, and which may differ from service to service."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.config.identity import differences, run_json
from forebay.config.models import RunFile


def run_with(**model: Any) -> str:
    """The run-defining part of a run with one reward model."""
    settings = {"path": "models/rm", "address": "127.0.0.1:7090", **model}
    tree = {"run": {"name": "t"}, "model": {"path": "m"}, "task": {"name": "t"}}
    return run_json(RunFile.model_validate({**tree, "reward": {"models": {"helpful": settings}}}))


@pytest.mark.parametrize("moved", [{"address": "127.0.0.1:7999"}, {"http": "127.0.0.1:7091"}, {"timeout_s": 3.0}])
def test_a_reward_model_may_move(moved: dict[str, Any]) -> None:
    assert run_with(**moved) == run_with()


def test_another_reward_model_is_another_run() -> None:
    [difference] = differences(run_with(), run_with(path="models/other"))
    assert difference == 'reward.models.helpful.path: "models/rm" in the run, "models/other" here'
    assert differences(run_with(), run_with(weight=2.0))


def learner_with(**learner: Any) -> str:
    """The run-defining part of a run with these settings of the learner."""
    tree = {"run": {"name": "t"}, "model": {"path": "m"}, "task": {"name": "t"}}
    return run_json(RunFile.model_validate({**tree, "learner": learner}))


@pytest.mark.parametrize(
    "moved",
    [
        {"ranks": 2, "launcher": "ray"},
        {"zero_stage": 3},
        {"reference": {"address": "127.0.0.1:7095"}},
        {"reference": {"offload": False}},
    ],
)
def test_where_a_run_is_trained_may_change(moved: dict[str, Any]) -> None:
    assert learner_with(**moved) == learner_with()


def test_another_reference_model_is_another_run() -> None:
    assert differences(learner_with(), learner_with(reference={"path": "models/other"}))
