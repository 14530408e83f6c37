"""Decoupled PPO's own weight (arXiv 2110.00641; for language models AReaL, arXiv 2505.24298): unbiased, unbounded.

w_t = proximal / behaviour
"""

from __future__ import annotations

import torch

from forebay.learner.corrections.correction import plain_weight
from forebay.learner.tokens import Tokens


def decoupled(tokens: Tokens) -> torch.Tensor:
    """A `Correction`."""
    return plain_weight(tokens)
