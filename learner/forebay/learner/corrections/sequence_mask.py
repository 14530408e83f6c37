"""Sequence masking: what the learner would hardly write any more, or the generator hardly wrote, is left out whole.

    m_i = exp( 1/|y_i| sum_t log(proximal / behaviour) )
    w_t = min(importance_cap, proximal / behaviour)  if  1/sequence_limit <= m_i <= sequence_limit,  else 0

After DeepSeek-V3.2 (arXiv 2512.02556), and not the same: there the mean log-ratio is from behaviour to current, one
side is cut (what the learner would hardly write any more) and only where the advantage is negative, and what stays has
no weight of its own. Here it is from behaviour to proximal, so that what is left out stays left out for the whole step;
both sides and both signs of the advantage are cut; and what stays has its truncated weight.
"""

from __future__ import annotations

import math

import torch

from forebay.learner.corrections.truncated_is import truncated_is
from forebay.learner.tokens import Tokens


def sequence_mask(tokens: Tokens, limit: float, cap: float) -> torch.Tensor:
    """A `Correction`, once `limit` and `cap` are given."""
    mean_b = tokens.sequences.mean(tokens.proximal_t - tokens.behaviour_t)
    kept_b = (mean_b.abs() <= math.log(limit)).to(mean_b.dtype)
    return truncated_is(tokens, cap) * tokens.sequences.spread(kept_b)
