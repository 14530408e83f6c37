"""Group sequence policy optimisation (arXiv 2507.18071): one ratio a sequence, length-normalised.

    s_i = exp( 1/|y_i| sum_t log(current / proximal) )
    objective of every token of sequence i: PPO's clipped surrogate of s_i

With `loss_aggregation = "sequence"` this is the paper's objective exactly. Its bounds are far narrower than a token
ratio's, as the mean moves less: the paper clips at 3e-4 and 4e-4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forebay.learner.objectives.ppo import PpoClip
from forebay.learner.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo:
    """An `Objective`."""

    clip: PpoClip

    def surrogate(self, tokens: Tokens) -> torch.Tensor:
        """The clipped surrogate of s_i at each token of sequence i."""
        return self.clip.bounded(_ratio_t(tokens), tokens.advantage_t)

    def clipped(self, tokens: Tokens) -> torch.Tensor:
        """Where s_i is beyond its bound."""
        return self.clip.outside(_ratio_t(tokens), tokens.advantage_t)


def _ratio_t(tokens: Tokens) -> torch.Tensor:
    sequences = tokens.sequences
    return sequences.spread(torch.exp(sequences.mean(tokens.current_t - tokens.proximal_t)))
