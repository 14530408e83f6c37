"""Where DeepSpeed keeps an engine's master weights and Adam moments, whole or in parts: read and set by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.nn import Parameter

MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerState(Protocol):
    """Whole float32 tensors, whoever holds which part of them. Reading is a collective call."""

    def master(self, parameter: Parameter) -> torch.Tensor: ...
    def moment(self, parameter: Parameter, key: str) -> torch.Tensor: ...
    def set_master(self, parameter: Parameter, value: torch.Tensor) -> None:
        """Of the parameter that computes, too."""
        ...

    def set_moment(self, parameter: Parameter, key: str, value: torch.Tensor) -> None: ...
    def make_moments(self, updates: int) -> None:
        """Room for the moments, which would else come with the first update, as after so many of them."""
        ...


class WholeState:
    """Without ZeRO: the parameters are the masters, on every rank."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def master(self, parameter: Parameter) -> torch.Tensor:
        return parameter.detach()

    def moment(self, parameter: Parameter, key: str) -> torch.Tensor:
        return self._optimizer.state[parameter][key]  # type: ignore[no-any-return]

    def set_master(self, parameter: Parameter, value: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(value)

    def set_moment(self, parameter: Parameter, key: str, value: torch.Tensor) -> None:
        self._optimizer.state[parameter][key].copy_(value)

    def make_moments(self, updates: int) -> None:
        _make(self._optimizer, _optimized(self._optimizer), updates)


class _ZeroState:
    """Any stage of ZeRO: DeepSpeed brings the ranks' parts together."""

    def __init__(self, optimizer: torch.optim.Optimizer, zero: Any) -> None:
        self._optimizer, self._zero = optimizer, zero

    def master(self, parameter: Parameter) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter)  # type: ignore[no-any-return]

    def moment(self, parameter: Parameter, key: str) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, key)  # type: ignore[no-any-return]


class SharedState(_ZeroState):
    """ZeRO 1 and 2: every rank has all weights, and of masters and moments its part."""

    def set_master(self, parameter: Parameter, value: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        with torch.no_grad():
            parameter.copy_(value)
        safe_set_full_fp32_param(parameter, value)

    def set_moment(self, parameter: Parameter, key: str, value: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(parameter, value, key)

    def make_moments(self, updates: int) -> None:
        _make(self._optimizer, _optimized(self._optimizer), updates)
        self._zero._lazy_init_hp_params_optimizer_state()


class PartitionedState(_ZeroState):
    """ZeRO 3: of weights, masters and moments every rank has its part."""

    def __init__(self, optimizer: torch.optim.Optimizer, zero: Any, rank: int) -> None:
        super().__init__(optimizer, zero)
        self._rank = rank

    def set_master(self, parameter: Parameter, value: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_local_fp32_param

        own = self._part(parameter, value)
        parameter.ds_tensor.data.copy_(own)  # type: ignore[attr-defined]
        safe_set_local_fp32_param(parameter, own)

    def set_moment(self, parameter: Parameter, key: str, value: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_local_optimizer_state

        safe_set_local_optimizer_state(parameter, self._part(parameter, value), key)

    def make_moments(self, updates: int) -> None:
        _make(self._optimizer, self._zero.fp32_partitioned_groups_flat, updates)

    def _part(self, parameter: Parameter, value: torch.Tensor) -> torch.Tensor:
        """This rank's; the last one is filled up with zeros. (DeepSpeed's setters of whole tensors do not do that.)"""
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        own = value.flatten()[self._rank * size : (self._rank + 1) * size]
        return torch.nn.functional.pad(own, (0, size - own.numel()))


def _optimized(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (master for group in optimizer.param_groups for master in group["params"])


def _make(optimizer: torch.optim.Optimizer, masters: Iterable[torch.Tensor], updates: int) -> None:
    for master in masters:
        zeros = {key: torch.zeros_like(master) for key in MOMENTS}
        optimizer.state[master] = {"step": torch.tensor(float(updates), device=master.device), **zeros}
