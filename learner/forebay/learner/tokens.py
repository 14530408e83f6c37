"""The trained tokens of a micro-batch, as objectives and corrections see them.

Three policies meet at every token: `behaviour` generated it (its log-probability came with the experience), `proximal`
is the learner's as the step began, `current` is what is being updated.

Shape suffixes: t trained tokens, b sequences (trajectories).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Which tokens belong together. A trajectory is never cut, so sequences are whole."""

    of_token_t: torch.Tensor  #: int64; rises
    lengths_b: torch.Tensor  #: trained tokens of each sequence, as floats

    def mean(self, x_t: torch.Tensor) -> torch.Tensor:
        """The mean of each sequence [b]."""
        return self.sum(x_t) / self.lengths_b.to(x_t.dtype)

    def sum(self, x_t: torch.Tensor) -> torch.Tensor:
        """The sum of each sequence [b]."""
        return x_t.new_zeros(len(self.lengths_b)).index_add(0, self.of_token_t, x_t)

    def spread(self, x_b: torch.Tensor) -> torch.Tensor:
        """To each token [t] its sequence's number."""
        return x_b.index_select(0, self.of_token_t)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Log-probabilities and advantages; only `current_t` has a gradient."""

    current_t: torch.Tensor
    proximal_t: torch.Tensor
    behaviour_t: torch.Tensor
    advantage_t: torch.Tensor
    sequences: Sequences
    expected_b: torch.Tensor  #: log of the group's expected behaviour probability, see corrections.group_expectation

    @property
    def ratio_t(self) -> torch.Tensor:
        """current / proximal, with its gradient."""
        return torch.exp(self.current_t - self.proximal_t)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Size of the whole minibatch, all ranks together, that a micro-batch is a part of."""

    tokens: int
    sequences: int

    @classmethod
    def sum(cls, ranks: Sequence[Sequence[int]]) -> Totals:
        """`ranks`: of each rank, the trained tokens of each of its sequences."""
        return cls(tokens=sum(map(sum, ranks)), sequences=sum(map(len, ranks)))
