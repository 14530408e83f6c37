"""The reference model: frozen weights that the policy should not stray far from.

Shape suffixes: t trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from forebay.config.models import RunFile
from forebay.learner.engine import Engine
from forebay.learner.lora import without_adapter
from forebay.learner.packing import MicroBatch
from forebay.learner.policy import Policy
from forebay.learner.pretrained import load_model
from forebay.learner.reference.client import RemoteReference
from forebay.learner.stop import Stop


class Reference(Protocol):
    """Whoever knows the log-probabilities of the model that the policy stays near."""

    def ready(self) -> None:
        """Return when it can be asked. Raises UsageError when it never will."""
        ...

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probability [t] of each trained token. A collective call."""
        ...

    def rest(self) -> None:
        """Nobody asks for a while."""
        ...


def load_reference(
    run: RunFile, actor: Engine[tuple[torch.Tensor, torch.Tensor]], stop: Stop, tell: Callable[[str], None]
) -> Reference:
    """A service, if the run file gives an address; beside an adapter, unless the run file names another model, the
    actor without it; else a model of its own. `stop` and `tell` are for a service that is waited for.

    Raises UsageError when there is no such model.
    """
    if run.learner.reference.address is not None:
        return RemoteReference(run, run.learner.reference.address, stop, tell)
    if run.learner.lora is not None and run.learner.reference.path is None:
        return BareActor(actor)
    return ReferenceModel(run, actor.device)


class BareActor:
    """The frozen model under the actor's adapter, which costs no memory."""

    def __init__(self, actor: Engine[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._actor = actor

    def ready(self) -> None:
        """It is."""

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probability [t] of each trained token. A collective call."""
        with without_adapter(self._actor.module):
            return self._actor.score(batch)[0]

    def rest(self) -> None:
        """The actor needs its weights."""


class ReferenceModel:
    """Log-probabilities under the weights that the run started from, computed in the policy's precision."""

    def __init__(self, run: RunFile, device: torch.device) -> None:
        """Raises UsageError when there is no such model."""
        dtype = getattr(torch, run.learner.compute_dtype)
        policy = Policy(load_model(run.learner.reference.path or run.model.path)).eval().requires_grad_(False)
        for parameter in policy.parameters():  # like DeepSpeed, and not the buffers: rotary frequencies stay float32
            parameter.data = parameter.data.to(dtype)
        self._policy, config = policy, policy.model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.longest: int = config.max_position_embeddings  #: tokens of a prompt with its reply
        self.device, self._offload = device, run.learner.reference.offload
        self.rest()

    def ready(self) -> None:
        """It is."""

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probability [t] of each trained token; brings the weights to the device when they rest elsewhere."""
        self._policy.to(self.device)
        logprob_t: torch.Tensor = self._policy(batch)[0]
        return logprob_t

    def rest(self) -> None:
        """Nobody asks for a while: free the device, if it is not host memory anyway."""
        self._policy.to(torch.device("cpu") if self._offload else self.device)
