"""PPO's clipped surrogate (arXiv 1707.06347), with two bounds (DAPO, arXiv 2503.14476) and, if wanted, the dual clip
(arXiv 1912.09729).

    rho_t = current / proximal
    s_t   = min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)
    s_t   = max(s_t, dual_clip A_t)  where A_t < 0: a token whose ratio exploded cannot pull without bound

With one update a step, proximal is current: rho is 1 and the clip rests; the size of a step is then bounded by the
correction, gradient clipping and the learning rate. From the second update of a step on the clip stops what has moved
beyond its bounds since the step began.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forebay.learner.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoClip:
    """An `Objective`."""

    clip_low: float
    clip_high: float
    dual_clip: float | None = None

    def surrogate(self, tokens: Tokens) -> torch.Tensor:
        """s_t."""
        return self.bounded(tokens.ratio_t, tokens.advantage_t)

    def clipped(self, tokens: Tokens) -> torch.Tensor:
        """Where s_t has no gradient."""
        return self.outside(tokens.ratio_t, tokens.advantage_t)

    def bounded(self, ratio_t: torch.Tensor, advantage_t: torch.Tensor) -> torch.Tensor:
        """s_t of any ratio."""
        clipped_t = ratio_t.clamp(1 - self.clip_low, 1 + self.clip_high)
        surrogate_t = torch.minimum(ratio_t * advantage_t, clipped_t * advantage_t)
        if self.dual_clip is None:
            return surrogate_t
        floor_t = torch.where(advantage_t < 0, self.dual_clip * advantage_t, -torch.inf)
        return torch.maximum(surrogate_t, floor_t)

    def outside(self, ratio_t: torch.Tensor, advantage_t: torch.Tensor) -> torch.Tensor:
        """Bool: the ratio is beyond the bound that holds for this sign of the advantage."""
        above_t = (advantage_t > 0) & (ratio_t > 1 + self.clip_high)
        below_t = (advantage_t < 0) & (ratio_t < 1 - self.clip_low)
        if self.dual_clip is None:
            return above_t | below_t
        return above_t | below_t | ((advantage_t < 0) & (ratio_t > self.dual_clip))
