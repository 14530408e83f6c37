"""What is compared: algorithms on fresh experience, and corrections on experience of every age."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AGES = (0, 2, 8, 32)
CORRECTIONS = ("none", "truncated_is", "icepop", "decoupled", "group_expectation")
DEFAULT_CORRECTION = "truncated_is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Settings of `[learner]` beyond the quickstart's. `age`: steps from the weights that generate to the update."""

    name: str
    learner: Mapping[str, Any] = field(default_factory=dict)
    age: int = 0


ALGORITHMS = (
    Cell(name="grpo"),
    Cell(name="rloo", learner={"estimator": "rloo"}),
    Cell(name="reinforce_pp", learner={"estimator": "reinforce_pp"}),
    Cell(name="ppo_critic", learner={"estimator": "gae", "lam": 0.95, "critic": {"lr": 1e-3}}),
    Cell(name="gspo", learner={"objective": "gspo", "loss_aggregation": "sequence"}),
    Cell(name="cispo", learner={"objective": "cispo"}),
)


def stale_cell(correction: str, age: int) -> Cell:
    """GRPO under a correction, with experience that is `age` steps old."""
    learner = {"correction": correction, "max_staleness": age, "uncorrected": correction == "none" and age > 0}
    return Cell(name=f"{correction}-{age}", learner=learner, age=age)


STALE = tuple(stale_cell(correction, age) for correction in CORRECTIONS for age in AGES)
