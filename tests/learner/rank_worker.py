"""One rank of a learner without a buffer: `python -m tests.learner.rank_worker MODEL FOLDER [CASE ...]` trains these
cases, or all, and on the lead writes what came of each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forebay.learner.batch import Batch
from forebay.learner.distributed import start_deepspeed
from forebay.learner.ranks import Ranks
from forebay.wire.trajectory import Trajectory
from tests.learner.models import random_groups
from tests.learner.trainers import FLEET, run_file, trainer_of

GROUPS, STEPS = 5, 2
SHUFFLED: Mapping[str, Any] = {"epochs": 2, "minibatches": 2, "tokens_per_microbatch": 40}
PPO: Mapping[str, Any] = {"preset": "ppo", "lr": 1e-3, "kl_coef": 0.1, "kl_in": "reward", "minibatch_trajectories": 6}
EVERYWHERE: Mapping[str, Any] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # small weights, too

#: By name: settings of the learner.
CASES: dict[str, Mapping[str, Any]] = {
    "whole": {**SHUFFLED, "zero_stage": 0},
    "optimizer": {**SHUFFLED, "zero_stage": 1},
    "gradients": {**SHUFFLED, "zero_stage": 2},
    "weights": {**SHUFFLED, "zero_stage": 3, "deepspeed": EVERYWHERE},
    "narrow": {"compute_dtype": "bfloat16", "zero_stage": 2, "estimator": "reinforce_pp", "entropy_coef": 0.01},
    "narrow weights": {"compute_dtype": "bfloat16", "zero_stage": 3, "deepspeed": EVERYWHERE, "objective": "gspo"},
    "critic": {**PPO, "zero_stage": 1},
    "critic weights": {**PPO, "zero_stage": 3, "deepspeed": EVERYWHERE, "gradient_checkpointing": True},
    "shaped": {"estimator": "reinforce_pp_baseline", "reward_normalize": True, "loss_aggregation": "sequence"},
    "sequence": {**SHUFFLED, "zero_stage": 0, "sequence_parallel": 2},
    "sequence weights": {**PPO, "zero_stage": 3, "deepspeed": EVERYWHERE, "sequence_parallel": 2},
    "idle": {"tokens_per_microbatch": 40, "zero_stage": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of a case: what the lead knows in the end."""

    metrics: list[dict[str, float]]
    state: dict[str, torch.Tensor]


def batch(case: str, step: int, ranks: Ranks) -> Batch:
    """This rank's groups of a step. In the case \"idle\" those of the second of two ranks teach nothing."""
    members = random_groups(step, groups=GROUPS)
    if case == "idle":
        members = [replace(one, reward=0.0) if one.group_id % 2 else one for one in members]
    return own_part(members, ranks)


def own_part(members: list[Trajectory], ranks: Ranks) -> Batch:
    """As a lease in parts gives it."""
    group_ids = list(dict.fromkeys(one.group_id for one in members))
    own = group_ids[ranks.rank :: ranks.count]
    mine = [one for one in members if one.group_id in own]
    return Batch(trajectories=mine, fleets=dict.fromkeys(own, FLEET), group_ids=group_ids)


def train(case: str, model: Path, ranks: Ranks) -> Outcome:
    """All steps of a case."""
    run = run_file(model, **CASES[case])
    data = ranks.in_teams(run.learner.sequence_parallel) if ranks.count > 1 else ranks
    trainer, roles = trainer_of(run, data)
    metrics = [trainer.train(step, batch(case, step, data)) for step in range(1, STEPS + 1)]
    return Outcome(metrics=metrics, state={name: tensor.clone() for name, tensor in roles.state()})


def main(model: Path, folder: Path, cases: Sequence[str]) -> None:
    """These cases, one after another."""
    start_deepspeed()
    ranks = Ranks.of_process_group()
    for case in cases:
        outcome = train(case, model, ranks)
        if ranks.is_lead:
            torch.save((outcome.metrics, outcome.state), folder / f"{case}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or list(CASES))
