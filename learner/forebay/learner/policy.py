"""The policy: a Hugging Face causal model that answers with log-probabilities of generated tokens only."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from forebay.learner.logprobs import selected_logprobs
from forebay.learner.packing import MicroBatch


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
        hidden_1ne = self.model.base_model(
            input_ids=batch.tokens_n[None],
            position_ids=batch.positions_n[None],
            use_cache=False,
            layout=batch.layout,
        ).last_hidden_state
        logprob_t, entropy_t = selected_logprobs(
            hidden_1ne[0].index_select(0, batch.source_t),
            self._head[0].weight,
            batch.target_t,
            batch.temperature_t,
            batch.top_p_t if bool((batch.top_p_t < 1).any()) else None,
        )
        return logprob_t, entropy_t if self._entropy_gradient else entropy_t.detach()
