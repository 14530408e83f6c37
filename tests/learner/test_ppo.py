"""PPO with a critic and a reference model, and KL in the loss, inside real DeepSpeed engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaForSequenceClassification

from forebay.errors import UsageError
from forebay.learner.critic import ValueModel
from forebay.learner.kl import ESTIMATES
from forebay.learner.policy import Policy
from forebay.learner.preparation import Preparation
from forebay.learner.roles import Roles
from forebay.obs.phases import PhaseClock
from forebay.wire.trajectory import Trajectory
from tests.learner.models import random_groups
from tests.learner.trainers import batch_of, packed, run_file, scores, trainer_of, values

KINDS = [("float32", 0, "k1"), ("float32", 2, "k2"), ("bfloat16", 1, "k3")]
PPO: dict[str, object] = {"preset": "ppo", "lr": 1e-3, "kl_coef": 0.1, "kl_in": "reward"}


def masters(roles: Roles) -> dict[str, torch.Tensor]:
    """A copy of every master weight of actor and critic."""
    return {name: tensor.clone() for name, tensor in roles.state() if "master/" in name}


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], role: str) -> float:
    """The longest way that a weight of the role went."""
    mine = [name for name in before if name.startswith("critic/") == (role == "critic")]
    return max(float((after[name] - before[name]).abs().max()) for name in mine)


@torch.no_grad()
def reference_scores(roles: Roles, trajectories: list[Trajectory]) -> torch.Tensor:
    assert roles.reference is not None
    return torch.cat([roles.reference.logprobs(batch) for batch in packed(trajectories)])


def test_a_critic_starts_from_a_reward_model_head_and_all(model_folder: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(model_folder, num_labels=1, pad_token_id=0)
    torch.manual_seed(3)
    scorer = LlamaForSequenceClassification(config)
    scorer.save_pretrained(tmp_path / "reward")
    _, roles = trainer_of(run_file(model_folder, **PPO, critic={"path": str(tmp_path / "reward")}))
    batch = random_groups(0)
    found = iter(values(roles, batch))
    with torch.no_grad():
        for trajectory in (sample.trajectory for micro in packed(batch) for sample in micro.samples):
            tokens = np.concatenate([trajectory.prompt_tokens, trajectory.tokens])
            hidden = scorer.model(torch.tensor(tokens[None].astype(np.int64))).last_hidden_state
            expected = scorer.score(hidden)[0, :, 0]
            for position in np.flatnonzero(trajectory.loss_mask) + len(trajectory.prompt_tokens) - 1:
                assert float(next(found)) == pytest.approx(float(expected[position]), abs=1e-5)
    assert next(found, None) is None


def test_a_critic_does_not_start_from_a_classifier(model_folder: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(model_folder, num_labels=3, pad_token_id=0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "kinds")
    with pytest.raises(UsageError, match=r"critic\.path.*one label"):
        trainer_of(run_file(model_folder, **PPO, critic={"path": str(tmp_path / "kinds")}))


@pytest.mark.parametrize(("dtype", "stage", "estimator"), KINDS)
def test_the_preset_trains_actor_and_critic_and_leaves_the_reference(
    model_folder: Path, dtype: str, stage: int, estimator: str
) -> None:
    run = run_file(model_folder, **PPO, compute_dtype=dtype, zero_stage=stage, kl_estimator=estimator)
    trainer, roles = trainer_of(run)
    batch = random_groups(0)
    first, reference, before = scores(roles, batch), reference_scores(roles, batch), masters(roles)
    assert torch.equal(reference, first), "the reference is the actor as it began"
    for step in (1, 2):
        metrics = trainer.train(step, batch_of(random_groups(step)))
        assert np.isfinite(list(metrics.values())).all()
        assert metrics["value_loss"] > 0
        assert metrics["policy_kl"] > 0, "from the second epoch on the actor is no longer what it was"
    assert roles.updates() == (6, 6), "three epochs a step"
    after = masters(roles)
    assert moved(before, after, "actor") > 1e-4
    assert moved(before, after, "critic") > 1e-6
    assert torch.equal(reference_scores(roles, batch), reference)
    assert not torch.allclose(scores(roles, batch), first)


def test_the_critic_starts_from_the_actors_trunk_and_knows_nothing(model_folder: Path) -> None:
    _, roles = trainer_of(run_file(model_folder, **PPO))
    assert roles.critic is not None
    actor, critic = roles.actor.module, roles.critic.module
    assert isinstance(actor, Policy)
    assert isinstance(critic, ValueModel)
    trunk, body = actor.model.base_model.state_dict(), critic.body.state_dict()
    assert trunk.keys() == body.keys()
    for name, tensor in trunk.items():
        assert torch.equal(body[name], tensor), name
        assert body[name].data_ptr() != tensor.data_ptr(), "but it is a trunk of its own"
    assert values(roles, random_groups(0)).abs().max() == 0


@pytest.mark.parametrize(("lr", "critic_lr"), [(1e-3, 1e-5), (1e-5, 1e-3), (0.0, 1e-3), (1e-3, 0.0)])
def test_actor_and_critic_move_at_their_own_learning_rates(model_folder: Path, lr: float, critic_lr: float) -> None:
    run = run_file(model_folder, **{**PPO, "lr": lr, "epochs": 1, "critic": {"lr": critic_lr}})
    trainer, roles = trainer_of(run)
    before = masters(roles)
    trainer.train(1, batch_of(random_groups(0)))
    after = masters(roles)
    # Adam's first step moves a weight by the learning rate, whatever its gradient.
    assert moved(before, after, "actor") == pytest.approx(lr, rel=1e-2)
    assert moved(before, after, "critic") == pytest.approx(critic_lr, rel=1e-2)


def returns(trajectories: list[Trajectory]) -> torch.Tensor:
    """With gamma = lambda = 1, neither normalisation nor KL: the reward, before every trained token."""
    rewards = [np.full(int(t.loss_mask.sum()), t.reward, np.float32) for t in trajectories]
    return torch.from_numpy(np.concatenate(rewards))


def test_values_move_towards_the_returns(model_folder: Path) -> None:
    critic: dict[str, object] = {"lr": 3e-3, "value_clip": 0.5}
    run = run_file(model_folder, estimator="gae", lr=0.0, epochs=3, critic=critic, tokens_per_microbatch=400)
    trainer, roles = trainer_of(run)
    batch = random_groups(0)
    errors = [float((values(roles, batch) - returns(batch)).square().mean())]
    for step in range(1, 9):
        trainer.train(step, batch_of(batch))
        errors.append(float((values(roles, batch) - returns(batch)).square().mean()))
    assert errors[-1] < 0.3 * errors[0]


def test_value_clipping_holds_the_values_near_the_steps_first_ones(model_folder: Path) -> None:
    def way(clip: float) -> float:
        # Without a first moment nothing goes on moving once its gradient is 0.
        settings: dict[str, object] = {"critic": {"lr": 1e-3, "value_clip": clip}, "betas": (0.0, 0.95)}
        trainer, roles = trainer_of(
            run_file(model_folder, **settings, estimator="gae", lr=0.0, epochs=8, tokens_per_microbatch=400)
        )
        batch = [replace(t, reward=10.0) for t in random_groups(0)]
        trainer.train(1, batch_of(batch))
        return float(values(roles, batch).mean())

    free, clipped = way(0.0), way(0.05)
    assert free > 0.5
    assert 0.05 < clipped < 0.3 * free


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_alone_lowers_its_own_estimate(model_folder: Path, other_folder: Path, estimator: str) -> None:
    run = run_file(
        model_folder, lr=2e-3, kl_coef=1.0, kl_estimator=estimator, reference={"path": str(other_folder)}
    )  # fmt: skip
    trainer, roles = trainer_of(run)
    batch = [replace(t, reward=0.0) for t in random_groups(0)]
    reference = reference_scores(roles, batch)

    def estimate() -> float:
        return float(ESTIMATES[estimator](scores(roles, batch), reference).mean())

    before = estimate()
    for step in range(1, 7):
        trainer.train(step, batch_of(batch))
    assert estimate() < before - 0.1 * abs(before)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward_is_each_tokens_cost(model_folder: Path, other_folder: Path, estimator: str) -> None:
    run = run_file(
        model_folder, estimator="gae", gamma=0.9, lam=0.8, kl_coef=0.3, kl_in="reward", kl_estimator=estimator,
        reference={"path": str(other_folder)},
    )  # fmt: skip
    _, roles = trainer_of(run)
    batch = random_groups(0)
    costs = 0.3 * ESTIMATES[estimator](scores(roles, batch).double(), reference_scores(roles, batch).double())
    groups = Preparation(roles, run, PhaseClock()).groups(batch, several_updates=False)
    samples, at = [sample for group in groups for sample in group], 0
    for sample in samples:
        rewards = -costs[at : at + sample.targets].numpy()
        rewards[-1] += sample.trajectory.reward
        at += sample.targets
        expected = [sum((0.9 * 0.8) ** k * r for k, r in enumerate(rewards[t:])) for t in range(sample.targets)]
        # The critic knows nothing yet: every value is 0, and the return is the discounted sum of what comes.
        assert sample.return_t is not None
        np.testing.assert_allclose(sample.return_t, expected, rtol=1e-4, atol=1e-5)
    assert at == len(costs)


def test_a_reference_in_host_memory_answers_the_same(model_folder: Path) -> None:
    batch = random_groups(0)
    answers = [
        reference_scores(trainer_of(run_file(model_folder, kl_coef=0.1, reference={"offload": offload}))[1], batch)
        for offload in (True, False)
    ]
    assert torch.equal(*answers)
