"""Truncated importance sampling, token by token (V-trace, arXiv 1802.01561).

    w_t = min(importance_cap, proximal / behaviour)

Bounded variance for a bias where the learner likes a token much more than its generator did.
"""

from __future__ import annotations

import torch

from forebay.learner.corrections.correction import plain_weight
from forebay.learner.tokens import Tokens


def truncated_is(tokens: Tokens, cap: float) -> torch.Tensor:
    """A `Correction`, once `cap` is given."""
    return plain_weight(tokens).clamp(max=cap)
