"""The reference model: frozen weights that the policy should not stray far from.

Shape suffixes: t trained tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch

from forebay.config.models import RunFile
from forebay.learner.engine import Engine
from forebay.learner.lora import without_adapter
from forebay.learner.packing import MicroBatch
from forebay.learner.policy import Policy
from forebay.learner.pretrained import load_model


class Reference(Protocol):
    """Whoever knows the log-probabilities of the model that the policy stays near."""

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probability [t] of each trained token. A collective call."""
        ...

    def rest(self) -> None:
        """Nobody asks for a while."""
        ...


def load_reference(run: RunFile, actor: Engine[tuple[torch.Tensor, torch.Tensor]]) -> Reference:
    """A model of its own; beside an adapter, unless the run file names another model, the actor without it.

    Raises UsageError when there is no such model.
    """
    if run.learner.lora is not None and run.learner.reference.path is None:
        return BareActor(actor)
    return ReferenceModel(run, actor.device)


class BareActor:
    """The frozen model under the actor's adapter, which costs no memory."""

    def __init__(self, actor: Engine[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._actor = actor

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
        self._policy = policy
        self._device, self._offload = device, run.learner.reference.offload
        self.rest()

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probability [t] of each trained token; brings the weights to the device when they rest elsewhere."""
        self._policy.to(self._device)
        logprob_t: torch.Tensor = self._policy(batch)[0]
        return logprob_t

    def rest(self) -> None:
        """Nobody asks for a while: free the device, if it is not host memory anyway."""
        self._policy.to(torch.device("cpu") if self._offload else self._device)
