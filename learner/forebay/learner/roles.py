"""Who takes part in learning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from forebay.config.models import RunFile
from forebay.learner.checkpoint import Counters
from forebay.learner.critic import load_critic
from forebay.learner.engine import Engine
from forebay.learner.policy import Policy
from forebay.learner.ranks import ALONE, Ranks
from forebay.learner.reference.model import Reference, load_reference
from forebay.learner.stop import Stop

CRITIC = "critic/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The actor, and where the run file asks for them a critic and a reference model."""

    actor: Engine[tuple[torch.Tensor, torch.Tensor]]
    critic: Engine[torch.Tensor] | None = None
    reference: Reference | None = None
    ranks: Ranks = ALONE

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors of everything that is trained. A collective call: all ranks make it."""
        yield from self.actor.state()
        if self.critic is not None:
            yield from ((CRITIC + name, tensor) for name, tensor in self.critic.state())

    def updates(self) -> tuple[int, int]:
        """Optimizer updates of the actor and of the critic."""
        return self.actor.optimizer_updates(), self.critic.optimizer_updates() if self.critic else 0

    def restore(self, state: Mapping[str, torch.Tensor], counters: Counters) -> None:
        """Take over what `state` gave. Raises KeyError, naming it, when a tensor is missing."""
        self.actor.restore(state, counters.updates)
        if self.critic is not None:
            self.critic.restore(state, counters.critic_updates, prefix=CRITIC)


def load_roles(
    run: RunFile,
    model: PreTrainedModel,
    ranks: Ranks = ALONE,
    *,
    stop: Stop | None = None,
    tell: Callable[[str], None] = lambda doing: None,
) -> Roles:
    """All of them, with `model` as the actor. `tell` hears what a role in another process is waited for, which ends
    when `stop` is asked. Raises UsageError when one cannot be loaded."""
    policy = Policy(model, entropy_gradient=run.learner.entropy_coef > 0).train()
    actor: Engine[tuple[torch.Tensor, torch.Tensor]] = Engine(policy, run.learner)
    return Roles(
        actor=actor,
        critic=load_critic(run) if run.learner.estimator == "gae" else None,
        reference=load_reference(run, actor, stop or Stop(), tell) if run.learner.kl_coef else None,
        ranks=ranks,
    )
