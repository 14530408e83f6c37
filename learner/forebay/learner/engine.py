"""A DeepSpeed engine: a module that is trained, with mixed precision, ZeRO, clipping and the optimizer behind it.

Three tiers of precision: fp32 master weights and Adam moments, compute in `compute_dtype` (float16 with a loss scale
that follows its gradients), gradients summed in `reduce_dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from forebay.config.learner_section import LearnerSection
from forebay.errors import UsageError
from forebay.learner import loss_scale
from forebay.learner.distributed import silence, start_deepspeed
from forebay.learner.loss_scale import LossScale
from forebay.learner.optimizer_state import MOMENTS, OptimizerState, PartitionedState, SharedState, WholeState
from forebay.learner.packing import MicroBatch

#: Elements that DeepSpeed stages at once where it reduces and gathers; its own default of 5e8 takes 2 GB.
BUCKET = 50_000_000
DEEPSPEED_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What became of one optimizer update."""

    grad_norm: float  #: before clipping; inf when it was not finite
    applied: bool  #: False: loss or gradient was not finite, the weights are as before
    rescaled: bool = False  #: not applied, but only as float16's loss scale was too high: it has been lowered


Scores = TypeVar("Scores")


class Engine(Generic[Scores]):
    """Owns a role's weights: `module` takes a micro-batch and gives `Scores`. Not for use by several threads."""

    def __init__(self, module: torch.nn.Module, settings: LearnerSection) -> None:
        """Raises UsageError where the machine cannot compute in the run file's dtype."""
        deepspeed = start_deepspeed()
        if settings.compute_dtype == "float16" and not deepspeed.accelerator.get_accelerator().is_fp16_supported():
            raise UsageError("learner.compute_dtype is float16, which this machine cannot train in; expected bfloat16")
        self.parameters = sum(p.numel() for p in module.parameters())  #: how large the model is, trained or not
        trained = dict(trained_parameters(module))
        masters = {name: p.detach().clone() for name, p in trained.items()} if _is_narrow(settings) else {}
        self._optimizer = torch.optim.AdamW(
            trained.values(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        with silence():
            self._engine, *_ = deepspeed.initialize(
                model=module, optimizer=self._optimizer, config=deepspeed_settings(settings)
            )
        self.module = module
        self._sharded = not isinstance(self._engine.optimizer, torch.optim.Optimizer)
        self._engine.enable_backward_allreduce = self._sharded  # without ZeRO `update` does it: it looks at the sum
        self._state = self._optimizer_state(zero_stage(settings))
        self._loss_scale = LossScale(self._engine.optimizer.loss_scaler) if _is_fp16(settings) else None
        self._loss_is_finite = torch.ones((), dtype=torch.bool, device=self.device)
        for name, master in masters.items():
            self._state.set_master(self.module.get_parameter(name), master)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return torch.device(self._engine.device)

    def score(self, batch: MicroBatch) -> Scores:
        """The module's forward pass."""
        return self._engine(batch)  # type: ignore[no-any-return]

    def accumulate(self, loss: torch.Tensor) -> None:
        """Add the gradients of one micro-batch's share of the loss.

        A loss that is not finite spoils the gradients on purpose, so that `update` refuses the whole minibatch.
        """
        is_finite = torch.isfinite(loss.detach())
        self._loss_is_finite &= is_finite
        # The gradient is averaged over ranks; shares of the loss are to be summed.
        share = torch.where(is_finite, float(self._engine.world_size), math.nan)
        self._engine.backward(loss * share, scale_wrt_gas=False)

    def update(self, lr: float) -> Update:
        """Clip what was accumulated and step, unless it is not finite; either way start accumulating anew."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._sharded:
            return self._sharded_update()
        if self._engine.world_size > 1:
            self._engine.buffered_allreduce_fallback(elements_per_buffer=BUCKET)
        norm = float(torch.nn.utils.get_total_norm(p.grad for p in self.module.parameters() if p.grad is not None))
        if not math.isfinite(norm):
            self._engine.zero_grad()
            return Update(grad_norm=math.inf, applied=False)
        self._engine.step()
        return Update(grad_norm=norm, applied=True)

    def _optimizer_state(self, stage: int) -> OptimizerState:
        if not self._sharded:
            return WholeState(self._optimizer)
        if stage < 3:
            return SharedState(self._optimizer, self._engine.optimizer)
        return PartitionedState(self._optimizer, self._engine.optimizer, self._engine.global_rank)

    def _sharded_update(self) -> Update:
        scale_can_fall = self._loss_scale is not None and self._loss_scale.can_fall
        self._engine.step()
        applied = not self._engine.optimizer.overflow
        rescaled = not applied and scale_can_fall and bool(self._loss_is_finite)
        self._loss_is_finite.fill_(True)
        norm = float(self._engine.get_global_grad_norm()) if applied else math.inf
        return Update(grad_norm=norm, applied=applied, rescaled=rescaled)

    def spoiled(self) -> list[str]:
        """Names of the trained weights with a number that is not finite, in what this rank holds of them."""
        named = dict(trained_parameters(self.module))
        held = [getattr(parameter, "ds_tensor", parameter) for parameter in named.values()]
        # One number that is not finite makes the sum so; asking each number takes 20 times as long (on a CPU).
        fine = torch.stack([part.sum().float() for part in held]).isfinite().tolist()
        suspects = [name for name, is_fine in zip(named, fine, strict=True) if not is_fine]
        return [name for name, part in zip(named, held, strict=True) if name in suspects and not part.isfinite().all()]

    def optimizer_updates(self) -> int:
        """Updates that were applied since the weights were new: Adam's own count."""
        return max((int(state["step"]) for state in self._optimizer.state.values()), default=0)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole fp32 tensors: every trained master weight and, after a first update, both of its moments.

        With float16 also its loss scale. The same on every number of ranks and at every ZeRO stage. A collective call:
        all ranks make it.
        """
        started = self.optimizer_updates() > 0
        if self._loss_scale is not None:
            yield loss_scale.NAME, self._loss_scale.state()
        for name, parameter in trained_parameters(self.module):
            yield f"master/{name}", self._state.master(parameter)
            for key in MOMENTS if started else ():
                yield f"{key}/{name}", self._state.moment(parameter, key)

    def restore(self, state: Mapping[str, torch.Tensor], updates: int, prefix: str = "") -> None:
        """Take over what `state` gave under names that begin with `prefix`, and the count of updates.

        Raises KeyError, naming it, when a tensor is missing.
        """
        if updates:
            self._state.make_moments(updates)
        if self._loss_scale is not None:
            self._loss_scale.restore(state[f"{prefix}{loss_scale.NAME}"])
        for name, parameter in trained_parameters(self.module):
            self._state.set_master(parameter, state[f"{prefix}master/{name}"])
            for key in MOMENTS if updates else ():
                self._state.set_moment(parameter, key, state[f"{prefix}{key}/{name}"])


def trained_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Those that are not frozen, by name: beside an adapter the model itself has neither masters nor moments."""
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def deepspeed_settings(settings: LearnerSection) -> dict[str, Any]:
    """DeepSpeed's configuration: what the run file's sections say, and under it `[learner.deepspeed]`."""
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # Micro-batches are sized by tokens: how many make a minibatch differs, so our call of step() ends it.
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": zero_stage(settings),
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "overlap_comm": False,
        },
    }
    if settings.offload_optimizer:
        ours["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        ours["zero_force_ds_cpu_optimizer"] = False  # its own Adam takes a compiler; torch's is fused on the CPU too
    if _is_narrow(settings):
        ours["data_types"] = {"grad_accum_dtype": DEEPSPEED_NAMES[settings.reduce_dtype]}
        ours["communication_data_type"] = DEEPSPEED_NAMES[settings.reduce_dtype]
        kind = DEEPSPEED_NAMES[settings.compute_dtype]
        ours[kind] = {"enabled": True, **({} if _is_fp16(settings) else {"check_grad_overflow": True})}
    return _merged(ours, settings.deepspeed)


def zero_stage(settings: LearnerSection) -> int:
    """The stage asked for; at least 1 with 16 bits, whose gradients DeepSpeed's stage 0 sums in 16 bits."""
    return max(1, settings.zero_stage) if _is_narrow(settings) else settings.zero_stage


def _is_narrow(settings: LearnerSection) -> bool:
    return settings.compute_dtype != "float32"


def _is_fp16(settings: LearnerSection) -> bool:
    return settings.compute_dtype == "float16"


def _merged(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
