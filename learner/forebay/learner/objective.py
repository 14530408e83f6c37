"""The clipped policy-gradient objective with a correction for experience that older weights generated.

Three policies meet at every token: `behaviour` generated it (its log-probability came with the experience),
`proximal` is the learner's as the step began, `current` is what is being updated.

    loss = -1/N  sum_t  w_t * min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)  -  entropy_coef * H
    rho_t = current / proximal          PPO's ratio (arXiv 1707.06347; two bounds: DAPO, arXiv 2503.14476)
    w_t   = min(importance_cap, proximal / behaviour)      no gradient; decoupled PPO (arXiv 2110.00641) with
                                        truncated importance sampling (arXiv 1802.01561; for engine mismatch and
                                        staleness in language models: arXiv 2505.24298)

N is the number of trained tokens of the whole minibatch, whatever micro-batches it is cut into, so every token
weighs the same. With one update a step, proximal is current: rho is 1 and the clip rests; the size of a step is then
bounded by `importance_cap`, gradient clipping and the learning rate. From the second update of a step on the clip
stops what has moved beyond its bounds since the step began.

Shape suffixes: t targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The coefficients of the loss."""

    clip_low: float
    clip_high: float
    importance_cap: float
    entropy_coef: float

    def loss(
        self,
        logprob_t: torch.Tensor,
        entropy_t: torch.Tensor,
        proximal_t: torch.Tensor,
        behaviour_t: torch.Tensor,
        advantage_t: torch.Tensor,
        tokens: int,
    ) -> torch.Tensor:
        """This micro-batch's share of the minibatch's loss, a scalar; the shares add up. `tokens` is N."""
        ratio_t = torch.exp(logprob_t - proximal_t)
        clipped_t = ratio_t.clamp(1 - self.clip_low, 1 + self.clip_high)
        surrogate_t = torch.minimum(ratio_t * advantage_t, clipped_t * advantage_t)
        loss = -(self.importance_weight(proximal_t, behaviour_t) * surrogate_t).sum() / tokens
        return loss - self.entropy_coef * entropy_t.sum() / tokens if self.entropy_coef else loss

    def importance_weight(self, proximal_t: torch.Tensor, behaviour_t: torch.Tensor) -> torch.Tensor:
        """w_t."""
        return torch.exp(proximal_t - behaviour_t).clamp(max=self.importance_cap)

    def clipped(self, logprob_t: torch.Tensor, proximal_t: torch.Tensor, advantage_t: torch.Tensor) -> torch.Tensor:
        """Bool [t]: the clip took this token's gradient away."""
        ratio_t = torch.exp(logprob_t - proximal_t)
        above_t = (advantage_t > 0) & (ratio_t > 1 + self.clip_high)
        below_t = (advantage_t < 0) & (ratio_t < 1 - self.clip_low)
        return above_t | below_t


def behaviour_kl(logprob_t: torch.Tensor, behaviour_t: torch.Tensor) -> torch.Tensor:
    """Per token, the k3 estimate of KL(behaviour || current) on behaviour's own tokens (Schulman 2020); >= 0."""
    difference_t = logprob_t - behaviour_t
    return torch.expm1(difference_t) - difference_t
