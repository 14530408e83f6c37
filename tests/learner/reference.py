"""The same mathematics once more, written the plain way: float64, one sequence at a time, full logits."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from transformers import PreTrainedModel

from forebay.learner.objective import Objective
from forebay.learner.packing import Sample
from forebay.wire.trajectory import Trajectory


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with transformers' own eager attention."""
    copy = deepcopy(model).double()
    copy.set_attn_implementation("eager")
    return copy


def logprobs(model: PreTrainedModel, trajectory: Trajectory) -> torch.Tensor:
    """Processed log-probabilities [targets] of the trained tokens of one trajectory."""
    tokens = torch.tensor([*trajectory.prompt_tokens.tolist(), *trajectory.tokens.tolist()])[None]
    logits = model(input_ids=tokens, use_cache=False).logits[0] / trajectory.temperature
    if trajectory.top_p < 1:
        logits = _nucleus(logits, tokens[0], trajectory.top_p)
    start = len(trajectory.prompt_tokens)
    chosen = torch.log_softmax(logits, -1)[torch.arange(start - 1, tokens.shape[1] - 1), tokens[0, start:]]
    return chosen[torch.from_numpy(trajectory.loss_mask)]


def _nucleus(logits: torch.Tensor, tokens: torch.Tensor, top_p: float) -> torch.Tensor:
    cut = logits.clone()
    for row in range(len(logits) - 1):
        probs = torch.softmax(logits[row], -1)
        order = probs.argsort(descending=True).tolist()
        mass, kept = 0.0, {int(tokens[row + 1])}
        for token in order:
            if mass >= top_p:
                break
            kept.add(token)
            mass += float(probs[token])
        cut[row, [token for token in order if token not in kept]] = float("-inf")
    return cut


def loss(model: PreTrainedModel, samples: Sequence[Sample], objective: Objective) -> torch.Tensor:
    """Token-mean loss of one update (proximal = current), without entropy."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        mask = torch.from_numpy(sample.trajectory.loss_mask)
        behaviour = torch.from_numpy(sample.trajectory.logprobs)[mask].double()
        logprob = logprobs(model, sample.trajectory)
        weight = torch.exp(logprob.detach() - behaviour).clamp(max=objective.importance_cap)
        ratio = torch.exp(logprob - logprob.detach())
        total = total - (weight * ratio * sample.advantage).sum()
        tokens += len(logprob)
    return total / tokens
