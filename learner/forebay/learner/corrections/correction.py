"""What a correction is.

Decoupled PPO (arXiv 2110.00641) parts two jobs of the old ratio current / behaviour: how far an update may go is
measured from `proximal`, the learner as the step began; that the experience came from another policy is put right by a
weight proximal / behaviour without a gradient. A correction is how that weight is tamed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from forebay.learner.tokens import Tokens

#: The weight of each token [t], without a gradient.
Correction = Callable[[Tokens], torch.Tensor]


def plain_weight(tokens: Tokens) -> torch.Tensor:
    """proximal / behaviour [t], as it is."""
    return torch.exp(tokens.proximal_t - tokens.behaviour_t)
