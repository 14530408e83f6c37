"""Clipped importance-sampling-weight policy optimisation (CISPO, MiniMax-M1, arXiv 2506.13585).

    s_t = stop_gradient(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_t log current_t        rho_t = current / proximal

A bound cuts a token's weight and never its gradient, so rare tokens that matter keep teaching.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forebay.learner.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo:
    """An `Objective`."""

    clip_low: float
    clip_high: float

    def surrogate(self, tokens: Tokens) -> torch.Tensor:
        """s_t."""
        weight_t = tokens.ratio_t.detach().clamp(1 - self.clip_low, 1 + self.clip_high)
        return weight_t * tokens.advantage_t * tokens.current_t

    def clipped(self, tokens: Tokens) -> torch.Tensor:
        """Where the weight is cut."""
        ratio_t = tokens.ratio_t
        return (ratio_t > 1 + self.clip_high) | (ratio_t < 1 - self.clip_low)
