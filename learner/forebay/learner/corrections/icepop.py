"""IcePop (Ling team, 2025; arXiv 2510.18855): tokens on which the two policies disagree teach nothing.

    w_t = proximal / behaviour  if  icepop_low <= proximal / behaviour <= icepop_high,  else 0

Where truncation keeps a cut weight, this drops the token: a ratio that far out is more often an error of one engine
than knowledge.
"""

from __future__ import annotations

import torch

from forebay.learner.corrections.correction import plain_weight
from forebay.learner.tokens import Tokens


def icepop(tokens: Tokens, low: float, high: float) -> torch.Tensor:
    """A `Correction`, once both bounds are given."""
    weight_t = plain_weight(tokens)
    return torch.where((weight_t >= low) & (weight_t <= high), weight_t, 0.0)
