"""Every algorithm gets better at something, on real engines, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.learner.bandit import play
from tests.learner.trainers import run_file

STEPS = 16
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"estimator": "dr_grpo", "loss_aggregation": "fixed", "loss_divisor": 4},
    "rloo": {"estimator": "rloo"},
    "reinforce_pp": {"estimator": "reinforce_pp"},
    "reinforce_pp_baseline": {"estimator": "reinforce_pp_baseline"},
    "gspo": {"objective": "gspo", "loss_aggregation": "sequence"},
    "cispo": {"objective": "cispo"},
    "decoupled, two epochs": {"correction": "decoupled", "epochs": 2},
    "ppo": {
        "preset": "ppo",
        "lr": 3e-3,
        "critic": {"lr": 3e-3},
        "kl_coef": 0.01,
        "kl_in": "reward",
        "minibatch_trajectories": "auto",
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_reward_rises(model_folder: Path, name: str) -> None:
    settings = {"lr": 3e-3, "minibatch_trajectories": 16, "tokens_per_microbatch": 400, **ALGORITHMS[name]}
    rewards, metrics = play(run_file(model_folder, **settings), STEPS)
    assert np.mean(rewards[:2]) < 0.65, "it cannot be good at it before it learns"
    assert np.mean(rewards[-2:]) > 0.85
    assert max(step.get("mismatch", 0) for step in metrics) < 1e-5, "player and learner compute the same numbers"
    assert max(step["policy_kl"] for step in metrics) > 1e-4


def test_the_critic_learns_what_a_reply_will_be_worth(model_folder: Path) -> None:
    critic: dict[str, Any] = {"lr": 3e-3, "value_clip": 0.0}
    _, metrics = play(run_file(model_folder, estimator="gae", lr=0.0, critic=critic, tokens_per_microbatch=400), STEPS)
    losses = [step["value_loss"] for step in metrics]
    assert 0 < np.mean(losses[-3:]) < 0.5 * losses[0]
