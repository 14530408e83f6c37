"""The loss scale of float16: as large as gradients allow, so that small ones do not vanish (arXiv 1710.03740)."""

from __future__ import annotations

from typing import Any

import torch

#: What DeepSpeed's scaler goes on from; all four decide when it moves next.
FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
NAME = "loss_scale"


class LossScale:
    """DeepSpeed's dynamic scaler, with its state in the open."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        # It would end the process at its lowest scale; what stays not finite there is for our guards, which count.
        scaler.raise_error_at_min_scale = False

    @property
    def can_fall(self) -> bool:
        """Whether a gradient that overflowed may be the scale's fault."""
        return bool(self._scaler.cur_scale > self._scaler.min_scale)

    def state(self) -> torch.Tensor:
        """Everything that it goes on from, as float64."""
        return torch.tensor([float(getattr(self._scaler, field)) for field in FIELDS], dtype=torch.float64)

    def restore(self, state: torch.Tensor) -> None:
        """Take over what `state` gave."""
        scale, *counts = state.tolist()
        self._scaler.cur_scale = scale
        for field, count in zip(FIELDS[1:], counts, strict=True):
            setattr(self._scaler, field, int(count))
