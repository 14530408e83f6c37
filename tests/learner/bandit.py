"""The smallest task that a policy can get better at: write even tokens. Played on the learner's own weights."""

from __future__ import annotations

import numpy as np
import torch

from forebay.config.models import RunFile
from forebay.learner.batch import Batch
from forebay.learner.policy import Policy
from forebay.learner.roles import Roles
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.version import Version
from tests.learner.models import VOCAB, tiny_llama
from tests.learner.trainers import batch_of, trainer_of

GROUPS, MEMBERS, PROMPT, REPLY = 8, 4, 3, 4


class Player:
    """Generates whole groups with whatever weights the actor has now."""

    def __init__(self, roles: Roles) -> None:
        assert isinstance(roles.actor.module, Policy)
        self._learned = roles.actor.module.model
        self._model = tiny_llama()
        self._model.set_attn_implementation("eager")
        self._prompts = np.random.default_rng(7).integers(0, VOCAB, (GROUPS, PROMPT)).astype(np.int32)

    @torch.no_grad()
    def batch(self, step: int) -> Batch:
        """The experience of `step`, of weights that are not stale."""
        self._model.load_state_dict(self._learned.state_dict())
        random = torch.Generator().manual_seed(step)
        tokens = torch.from_numpy(self._prompts).long().repeat_interleave(MEMBERS, dim=0)
        logprobs = []
        for _ in range(REPLY):
            distribution = torch.log_softmax(self._model(input_ids=tokens, use_cache=False).logits[:, -1], -1)
            chosen = torch.multinomial(distribution.exp(), 1, generator=random)
            logprobs.append(distribution.gather(1, chosen))
            tokens = torch.cat([tokens, chosen], 1)
        rows = zip(tokens[:, PROMPT:].numpy().astype(np.int32), torch.cat(logprobs, 1).numpy(), strict=True)
        return batch_of([self._trajectory(index, *row, step) for index, row in enumerate(rows)])

    def _trajectory(self, index: int, tokens: np.ndarray, logprobs: np.ndarray, step: int) -> Trajectory:
        group, member = divmod(index, MEMBERS)
        return Trajectory(
            group_id=step * GROUPS + group,
            member=member,
            prompt_tokens=self._prompts[group],
            tokens=tokens,
            loss_mask=np.ones(REPLY, np.bool_),
            logprobs=logprobs,
            spans=(VersionSpan(start=0, version=Version(1, step - 1)),),
            temperature=1.0,
            top_p=1.0,
            reward=float(np.mean(tokens % 2 == 0)),
        )


def play(run: RunFile, steps: int) -> tuple[list[float], list[dict[str, float]]]:
    """Train `steps` steps on fresh experience; the mean reward and the metrics of each."""
    trainer, roles = trainer_of(run)
    player, rewards, metrics = Player(roles), [], []
    for step in range(1, steps + 1):
        batch = player.batch(step)
        rewards.append(float(np.mean([trajectory.reward for trajectory in batch.trajectories])))
        metrics.append(trainer.train(step, batch))
    return rewards, metrics
