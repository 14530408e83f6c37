"""The same mathematics once more, written the plain way: float64, one sequence at a time, full logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from forebay.learner.sample import Sample
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence64:
    """One trajectory's trained tokens as plain float64 numbers; `current` may have a gradient."""

    group: int
    current: torch.Tensor
    proximal: list[float]
    behaviour: list[float]
    advantage: list[float]
    reference: list[float]
    entropy: torch.Tensor


def policy_loss(sequences: Sequence[Sequence64], settings: Mapping[str, object]) -> tuple[torch.Tensor, float]:
    """The minibatch's loss by the formulas of the papers, token by token, and the sum of its terms' sizes."""
    terms = [
        (sequence, index, _term(sequence, index, sequences, settings))
        for sequence in sequences
        for index in range(len(sequence.current))
    ]
    tokens, count = len(terms), len(sequences)
    total, size = torch.zeros((), dtype=torch.float64), 0.0
    for sequence, _, term in terms:
        divisor = {
            "token": tokens,
            "sequence": count * len(sequence.current),
            "fixed": count * int(str(settings["divisor"])),
        }[str(settings["aggregation"])]
        total = total + term / divisor
        size += abs(float(term.detach())) / divisor
    return total, size


def _term(
    sequence: Sequence64, index: int, batch: Sequence[Sequence64], settings: Mapping[str, object]
) -> torch.Tensor:
    number = {key: float(str(value)) for key, value in settings.items() if isinstance(value, int | float)}
    term = -_weight(sequence, index, batch, settings, number) * _surrogate(sequence, index, settings, number)
    term = term - number["entropy_coef"] * sequence.entropy[index]
    difference = sequence.reference[index] - sequence.current[index]
    kl = {"k1": -difference, "k2": difference**2 / 2, "k3": torch.exp(difference) - 1 - difference}
    return term + number["kl_coef"] * kl[str(settings["kl"])]


def _surrogate(
    sequence: Sequence64, index: int, settings: Mapping[str, object], number: Mapping[str, float]
) -> torch.Tensor:
    advantage = sequence.advantage[index]
    low, high = 1 - number["clip_low"], 1 + number["clip_high"]
    logs = [sequence.current[i] - sequence.proximal[i] for i in range(len(sequence.current))]
    ratio = torch.exp(sum(logs, torch.zeros(())) / len(logs) if settings["objective"] == "gspo" else logs[index])
    if settings["objective"] == "cispo":
        return min(max(float(ratio.detach()), low), high) * advantage * sequence.current[index]
    inside = ratio if low <= float(ratio.detach()) <= high else torch.tensor(min(max(float(ratio.detach()), low), high))
    surrogate = min(ratio * advantage, inside * advantage, key=lambda x: float(x.detach()))
    bound = settings.get("dual_clip")
    if isinstance(bound, float) and advantage < 0 and float(surrogate.detach()) < bound * advantage:
        return torch.tensor(bound * advantage, dtype=torch.float64)
    return surrogate


def _weight(
    sequence: Sequence64,
    index: int,
    batch: Sequence[Sequence64],
    settings: Mapping[str, object],
    number: Mapping[str, float],
) -> float:
    ratio = math.exp(sequence.proximal[index] - sequence.behaviour[index])
    mean = float(np.mean(np.subtract(sequence.proximal, sequence.behaviour)))
    match settings["correction"]:
        case "none":
            return 1.0
        case "decoupled":
            return ratio
        case "truncated_is":
            return min(ratio, number["cap"])
        case "icepop":
            return ratio if number["icepop_low"] <= ratio <= number["icepop_high"] else 0.0
        case "sequence_mask":
            inside = 1 / number["sequence_limit"] <= math.exp(mean) <= number["sequence_limit"]
            return min(ratio, number["cap"]) if inside else 0.0
        case "group_expectation":
            q = [math.exp(float(np.mean(other.behaviour))) for other in batch if other.group == sequence.group]
            return math.exp(float(np.mean(sequence.proximal))) / (sum(x * x for x in q) / sum(q))
    raise AssertionError(settings["correction"])


def truncated_is_loss(model: PreTrainedModel, samples: Sequence[Sample], cap: float) -> torch.Tensor:
    """Token-mean loss of one update (proximal = current), without entropy, through the whole model."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        mask = torch.from_numpy(sample.trajectory.loss_mask)
        behaviour = torch.from_numpy(sample.trajectory.logprobs)[mask].double()
        logprob = logprobs(model, sample.trajectory)
        weight = torch.exp(logprob.detach() - behaviour).clamp(max=cap)
        ratio = torch.exp(logprob - logprob.detach())
        assert sample.advantage_t is not None
        total = total - (weight * ratio * torch.from_numpy(sample.advantage_t).double()).sum()
        tokens += len(logprob)
    return total / tokens
