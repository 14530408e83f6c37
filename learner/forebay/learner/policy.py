"""The policy: a Hugging Face causal model that answers with log-probabilities of generated tokens only."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from forebay.learner.logprobs import selected_logprobs
from forebay.learner.packing import MicroBatch
from forebay.learner.sequence_parallel import hidden_at_targets


class Policy(nn.Module):
    """Wraps a causal language model whose attention implementation is `forebay_packed`."""

    def __init__(self, model: PreTrainedModel, *, entropy_gradient: bool = False) -> None:
        super().__init__()
        self.model = model
        self._entropy_gradient = entropy_gradient
        head = model.get_output_embeddings()
        assert head is not None, "load_model refuses a model without an output layer"
        self._head = [head]  # in a list: a second module by another name would be saved and listed twice

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability [t] and entropy [t] of the targets; the head sees only the tokens that predict them."""
        own = hidden_at_targets(self.model.base_model, batch)
        logprob_o, entropy_o = selected_logprobs(
            own.hidden_oe,
            self._head[0].weight,
            own.of(batch.target_t),
            own.of(batch.temperature_t),
            own.of(batch.top_p_t) if batch.nucleus else None,
        )
        logprob_t, entropy_t = own.everywhere(logprob_o), own.everywhere(entropy_o)
        return logprob_t, entropy_t if self._entropy_gradient else entropy_t.detach()
