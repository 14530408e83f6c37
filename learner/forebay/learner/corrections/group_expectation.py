"""Group-expectation weights (GEPO, arXiv 2508.17850): the denominator is the group's, not each sequence's own.

    p_i = exp(1/|y_i| sum_t log proximal),  q_i = exp(1/|y_i| sum_t log behaviour)      length-normalised, as in GSPO
    E   = sum_j q_j^2 / sum_j q_j                                                       over the group
    w_t = p_i / E  for every token of sequence i

One unlikely sequence cannot blow its own weight up, as its q_i is only a part of E.

The paper has one factor p_i / E with a gradient in p_i = current. Here, as everywhere, the correction is the part
without a gradient and the objective goes on from proximal to current: with `objective = "gspo"` their product is the
paper's exp(mean log current) / E; with the other objectives the part with the gradient is a token's own. The lengths
are those of trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forebay.learner.tokens import Tokens
from forebay.wire.trajectory import Trajectory


def group_expectation(tokens: Tokens) -> torch.Tensor:
    """A `Correction`."""
    sequences = tokens.sequences
    return sequences.spread(
        torch.exp(sequences.mean(tokens.proximal_t) - tokens.expected_b.to(tokens.proximal_t.dtype))
    )


def expected_logprob(group: Sequence[Trajectory]) -> float:
    """log E of a whole group; members without a trained token do not count, and without any it is 0."""
    means = [
        float(member.logprobs[member.loss_mask].astype(np.float64).mean()) for member in group if member.loss_mask.any()
    ]
    if not means:
        return 0.0
    log_q = np.asarray(means)
    return float(np.logaddexp.reduce(2 * log_q) - np.logaddexp.reduce(log_q))
