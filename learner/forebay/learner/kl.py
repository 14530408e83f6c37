"""Estimates of a KL divergence from one sample a token (Schulman, "Approximating KL divergence", 2020).

With d = log other - log this at a token that `this` policy generated, KL(this || other) is about

    k1 = -d                 unbiased, any sign
    k2 = d^2 / 2            biased, never negative
    k3 = exp(d) - 1 - d     unbiased, never negative

An estimate that is right need not have the right gradient, and `kl_in = "loss"` uses nothing but the gradient. Averaged
over tokens that `this` generated, and with them held constant,

    grad k1 = grad log this                   is 0: such a term adds noise and pulls nowhere
    grad k2 = -d grad log this                is the gradient of KL(this || other)
    grad k3 = (1 - exp(d)) grad log this      is the gradient of KL(other || this)

With `kl_in = "reward"` the estimate is a number without a gradient, and k1 is the unbiased choice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

#: From log this [t] and log other [t] to the estimate [t].
KlEstimate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def k1(this_t: torch.Tensor, other_t: torch.Tensor) -> torch.Tensor:
    """log this - log other."""
    return this_t - other_t


def k2(this_t: torch.Tensor, other_t: torch.Tensor) -> torch.Tensor:
    """Half the squared difference."""
    return (other_t - this_t).square() / 2


def k3(this_t: torch.Tensor, other_t: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d."""
    difference_t = other_t - this_t
    return torch.expm1(difference_t) - difference_t


ESTIMATES: dict[str, KlEstimate] = {"k1": k1, "k2": k2, "k3": k3}
