"""What an objective is."""

from __future__ import annotations

from typing import Protocol

import torch

from forebay.learner.tokens import Tokens


class Objective(Protocol):
    """What is to be maximised, token by token."""

    def surrogate(self, tokens: Tokens) -> torch.Tensor:
        """[t], with the gradient."""
        ...

    def clipped(self, tokens: Tokens) -> torch.Tensor:
        """Bool [t]: a bound took this token's gradient away or cut its weight."""
        ...
