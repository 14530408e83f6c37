"""No correction: experience counts as if the learner had just generated it.

    w_t = 1

Right where it has (max_staleness = 0 and a sampler that computes the same numbers); a run file that says this with
older experience must say it twice.
"""

from __future__ import annotations

import torch

from forebay.learner.tokens import Tokens


def none(tokens: Tokens) -> torch.Tensor:
    """A `Correction`."""
    return torch.ones_like(tokens.behaviour_t)
