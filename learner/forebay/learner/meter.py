"""What is measured of one step, on the host and in float64.

Five differences of log-probabilities are kept apart, because their cures differ:

    kl            behaviour -> current: all of it, what `learner.max_kl` bounds
    mismatch      behaviour -> proximal on the freshest tokens: sampler and learner compute the same weights differently
    policy_kl     proximal -> current: how far the updates of this step have gone
    the rest      is staleness
    reference_kl  current -> reference: how far the policy has strayed, where there is a reference model

Shape suffixes: t trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.learner.packing import on_host
from forebay.learner.sample import Sample, by_sample

Floats = NDArray[np.float64]
SUMS = (
    "tokens", "seen", "clipped", "capped", "policy_kl", "kl", "ratio_minus_1", "entropy", "loss", "value_loss",
    "referred", "reference_kl",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Fresh:
    """Sums over the tokens that weights of one step generated."""

    tokens: int = 0
    absolute: float = 0.0
    kl: float = 0.0

    def add(self, other: Fresh) -> None:
        """Take more in."""
        self.tokens += other.tokens
        self.absolute += other.absolute
        self.kl += other.kl


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a micro-batch's forward pass leaves on the device."""

    columns: dict[str, torch.Tensor]  #: [t], by the names that they have in `Measured`
    loss: torch.Tensor  #: a scalar
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A micro-batch after its forward pass, on the host."""

    current_t: Floats
    proximal_t: Floats
    behaviour_t: Floats
    entropy_t: Floats
    weight_t: Floats
    clipped_t: Floats  #: 0 or 1
    loss: float
    samples: Sequence[Sample]

    @classmethod
    def of(cls, passes: Sequence[Pass]) -> list[Measured]:
        """All of a minibatch, brought to the host at once: the device is waited for only here."""
        parts = [torch.stack([x.detach().double() for x in one.columns.values()]).flatten() for one in passes]
        losses, *rows = on_host([torch.stack([one.loss.detach().double() for one in passes]), *parts])
        return [
            cls(
                **dict(zip(one.columns, own.reshape(len(one.columns), -1), strict=True)),
                loss=float(loss),
                samples=one.samples,
            )
            for one, loss, own in zip(passes, losses, rows, strict=True)
        ]


@dataclass(slots=True, kw_only=True)
class StepMeter:
    """Sums over the tokens of one step."""

    tokens: int = 0  #: of the first epoch, like all sums but the next four and the losses
    seen: int = 0
    clipped: float = 0.0
    capped: float = 0.0
    policy_kl: float = 0.0
    kl: float = 0.0
    ratio_minus_1: float = 0.0
    entropy: float = 0.0
    loss: float = 0.0
    value_loss: float = 0.0
    referred: int = 0  #: tokens that the reference model has scored
    reference_kl: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    critic_grad_norms: list[float] = field(default_factory=list)
    fresh: dict[int, Fresh] = field(default_factory=dict)

    @classmethod
    def sum(cls, meters: Sequence[StepMeter]) -> StepMeter:
        """Of all ranks together; norms are everybody's already."""
        whole = cls(grad_norms=meters[0].grad_norms, critic_grad_norms=meters[0].critic_grad_norms)
        for meter in meters:
            for name in SUMS:
                setattr(whole, name, getattr(whole, name) + getattr(meter, name))
            for step, fresh in meter.fresh.items():
                whole.fresh.setdefault(step, Fresh()).add(fresh)
        return whole

    def add(self, batch: Measured, *, first: bool) -> Floats:
        """Take a micro-batch in, `first`: of the first epoch; returns its KL [t]."""
        self.seen += len(batch.current_t)
        self.loss += batch.loss
        self.clipped += float(batch.clipped_t.sum())
        plain_t = np.exp(batch.proximal_t - batch.behaviour_t)
        self.capped += float((batch.weight_t < plain_t * (1 - 1e-6)).sum())
        self.policy_kl += float(_k3(batch.current_t - batch.proximal_t).sum())
        kl_t = _k3(batch.current_t - batch.behaviour_t)
        if first:
            self._add_first(batch, kl_t)
        return kl_t

    def _add_first(self, batch: Measured, kl_t: Floats) -> None:
        self.tokens += len(kl_t)
        self.kl += float(kl_t.sum())
        self.ratio_minus_1 += float(np.abs(np.expm1(batch.current_t - batch.behaviour_t)).sum())
        self.entropy += float(batch.entropy_t.sum())
        for sample, mismatch_t in by_sample(batch.samples, batch.proximal_t - batch.behaviour_t):
            self._add_fresh(sample, mismatch_t)
        for sample, current_t in by_sample(batch.samples, batch.current_t):
            if sample.reference_t is not None:
                self.referred += len(current_t)
                self.reference_kl += float(_k3(sample.reference_t - current_t).sum())

    def _add_fresh(self, sample: Sample, mismatch_t: Floats) -> None:
        steps = np.asarray([span.version.step for span in sample.trajectory.spans], np.int64)
        step_t = steps[sample.span_t]
        for step in np.unique(step_t):
            of_step_t = mismatch_t[step_t == step]
            absolute, kl = float(np.abs(of_step_t).sum()), float(_k3(of_step_t).sum())
            self.fresh.setdefault(int(step), Fresh()).add(Fresh(tokens=len(of_step_t), absolute=absolute, kl=kl))

    def metrics(self, step: int) -> dict[str, float]:
        """Means over tokens, and the mismatch of the freshest ones."""
        first, seen = max(1, self.tokens), max(1, self.seen)
        found = {
            "loss": self.loss / max(1, len(self.grad_norms)),
            "kl": self.kl / first,
            "ratio_minus_1": self.ratio_minus_1 / first,
            "policy_kl": self.policy_kl / seen,
            "clip_fraction": self.clipped / seen,
            "capped_fraction": self.capped / seen,
            "entropy": self.entropy / first,
            "grad_norm": float(np.mean(self.grad_norms)) if self.grad_norms else 0.0,
            "trained_tokens": self.tokens,
        }
        return found | self._mismatch(step) | self._reference() | self._critic()

    def _mismatch(self, step: int) -> dict[str, float]:
        if not self.fresh:
            return {}
        newest = max(self.fresh)
        fresh = self.fresh[newest]
        return {
            "mismatch": fresh.absolute / fresh.tokens,
            "mismatch_kl": fresh.kl / fresh.tokens,
            "mismatch_staleness": max(0, step - 1 - newest),
        }

    def _reference(self) -> dict[str, float]:
        return {"reference_kl": self.reference_kl / self.referred} if self.referred else {}

    def _critic(self) -> dict[str, float]:
        if not self.critic_grad_norms:
            return {}
        updates = len(self.critic_grad_norms)
        return {
            "value_loss": self.value_loss / updates,
            "critic_grad_norm": float(np.mean(self.critic_grad_norms)),
        }


def _k3(difference_t: Floats) -> Floats:
    """`forebay.learner.kl.k3` of log other - log this, on the host."""
    return np.asarray(np.expm1(difference_t) - difference_t)
