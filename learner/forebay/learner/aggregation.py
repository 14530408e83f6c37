"""What weighs the same in the loss.

    token     1/N each, N trained tokens of the minibatch (DAPO, arXiv 2503.14476)
    sequence  1/(S |y_i|) each: every one of S trajectories weighs the same (GRPO, arXiv 2402.03300)
    fixed     1/(S L) each, L a constant: a token weighs the same whatever its reply's length (Dr. GRPO, 2503.20783)

N and S are the whole minibatch's, whatever micro-batches it is cut into.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from forebay.config.models import RunFile
from forebay.learner.tokens import Sequences, Totals

#: The share of each token [t] in the loss.
Aggregate = Callable[[Sequences, Totals], torch.Tensor]


def by_token(sequences: Sequences, totals: Totals) -> torch.Tensor:
    """1/N."""
    return torch.full_like(sequences.spread(sequences.lengths_b), 1 / totals.tokens)


def by_sequence(sequences: Sequences, totals: Totals) -> torch.Tensor:
    """1/(S |y_i|)."""
    return sequences.spread(1 / (totals.sequences * sequences.lengths_b))


def aggregate(run: RunFile) -> Aggregate:
    """The one that `learner.loss_aggregation` names."""
    divisor = run.learner.loss_divisor or run.sampler.max_new_tokens

    def fixed(sequences: Sequences, totals: Totals) -> torch.Tensor:
        return torch.full_like(sequences.spread(sequences.lengths_b), 1 / (totals.sequences * divisor))

    return {"token": by_token, "sequence": by_sequence, "fixed": fixed}[run.learner.loss_aggregation]
