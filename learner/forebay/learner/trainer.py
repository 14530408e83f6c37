"""One step: from a batch of trajectories to updated weights, and what happened on the way.

Shape suffixes: t targets of a micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from forebay.config.models import RunFile
from forebay.learner.advantages import with_advantages
from forebay.learner.engine import Engine
from forebay.learner.errors import KlExceeded, NonFiniteTraining
from forebay.learner.lr import learning_rate
from forebay.learner.objective import Objective, behaviour_kl
from forebay.learner.packing import MicroBatch, Sample, pack
from forebay.obs.phases import PhaseClock
from forebay.wire.trajectory import Trajectory

#: Updates refused in a row after which training has failed.
PATIENCE = 3

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Sums:
    """Sums over the tokens of one step, in float64, and its worst group."""

    tokens: int = 0
    kl: float = 0.0
    ratio_minus_1: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    capped: float = 0.0
    loss: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    kl_of_group: dict[int, tuple[float, int]] = field(default_factory=dict)

    def mean(self, value: float) -> float:
        return value / self.tokens if self.tokens else 0.0


class Trainer:
    """Owns how a batch becomes updates: a pure function of the engine's state and the batch."""

    def __init__(self, engine: Engine, run: RunFile, clock: PhaseClock) -> None:
        self._engine = engine
        self._settings = run.learner
        self._seed = run.run.seed
        self._clock = clock
        self._refused_in_a_row = 0
        self.skipped = 0
        self._objective = Objective(
            clip_low=run.learner.clip_low,
            clip_high=run.learner.clip_high,
            importance_cap=run.learner.importance_cap,
            entropy_coef=run.learner.entropy_coef,
        )

    def train(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Train one batch in place; returns its metrics.

        Raises KlExceeded before the update that would start from too far away, NonFiniteTraining after PATIENCE
        refused updates in a row, BadExperience for rewards that are not finite.
        """
        groups = with_advantages(trajectories, normalize=self._settings.normalize_advantage)
        sums, several = _Sums(), self._settings.epochs * self._settings.minibatches > 1
        plan = list(self._minibatches(step, groups))
        proximal = self._proximal(plan) if several else None
        for index, samples in enumerate(plan):
            self._minibatch(step, samples, sums, proximal, first=index < self._settings.minibatches)
        return self._metrics(step, sums)

    def _minibatches(self, step: int, groups: list[list[Sample]]) -> Iterator[list[Sample]]:
        """Whole groups, shuffled anew each epoch when there are several updates."""
        random = np.random.default_rng((self._seed, step))
        for _ in range(self._settings.epochs):
            order = random.permutation(len(groups)) if self._settings.minibatches > 1 else np.arange(len(groups))
            for part in np.array_split(order, min(self._settings.minibatches, len(groups))):
                yield [sample for index in part for sample in groups[index]]

    def _proximal(self, plan: list[list[Sample]]) -> dict[int, torch.Tensor]:
        """The learner's log-probabilities as the step begins, by sample."""
        known: dict[int, torch.Tensor] = {}
        epoch = [sample for samples in plan[: self._settings.minibatches] for sample in samples]
        for batch in self._packed(epoch):
            with self._clock.phase("forward"), torch.no_grad():
                logprob_t, _ = self._engine.score(batch)
            counts = [sample.targets for sample in batch.samples]
            known |= {id(s): part for s, part in zip(batch.samples, torch.split(logprob_t, counts), strict=True)}
        return known

    def _minibatch(
        self, step: int, samples: list[Sample], sums: _Sums, proximal: dict[int, torch.Tensor] | None, *, first: bool
    ) -> None:
        batches = self._packed(samples)
        if not batches:
            return
        tokens = sum(sample.targets for sample in samples)
        for batch in batches:
            with self._clock.phase("forward"):
                logprob_t, entropy_t = self._engine.score(batch)
                proximal_t = logprob_t.detach()
                if proximal is not None:
                    proximal_t = torch.cat([proximal[id(sample)] for sample in batch.samples])
                loss = self._objective.loss(
                    logprob_t, entropy_t, proximal_t, batch.behaviour_t, batch.advantage_t, tokens
                )
            with self._clock.phase("backward"):
                self._engine.accumulate(loss)
            sums.loss += float(loss.detach())
            self._measure(batch, logprob_t.detach(), entropy_t.detach(), proximal_t, sums, first)
        self._guard_kl(step, sums)
        with self._clock.phase("optimizer"):
            self._update(step, sums)

    def _packed(self, samples: list[Sample]) -> list[MicroBatch]:
        """Micro-batches of what has a gradient: without entropy bonus a zero advantage has none, so it is left out."""
        useful = samples if self._settings.entropy_coef else [sample for sample in samples if sample.advantage]
        return [batch.to(self._engine.device) for batch in pack(useful, self._settings.tokens_per_microbatch)]

    def _measure(
        self,
        batch: MicroBatch,
        logprob_t: torch.Tensor,
        entropy_t: torch.Tensor,
        proximal_t: torch.Tensor,
        sums: _Sums,
        first: bool,
    ) -> None:
        """KL, ratio and entropy describe the policy as the step began; clipping is counted over all updates."""
        clipped_t = self._objective.clipped(logprob_t, proximal_t, batch.advantage_t)
        sums.clipped += float(clipped_t.double().mean()) * batch.targets
        sums.capped += float((proximal_t - batch.behaviour_t > np.log(self._settings.importance_cap)).sum())
        if not first:
            return
        kl_t = behaviour_kl(logprob_t, batch.behaviour_t).double()
        sums.tokens += batch.targets
        sums.kl += float(kl_t.sum())
        sums.ratio_minus_1 += float(torch.expm1(logprob_t - batch.behaviour_t).double().abs().sum())
        sums.entropy += float(entropy_t.double().sum())
        counts = [sample.targets for sample in batch.samples]
        for sample, part in zip(batch.samples, torch.split(kl_t, counts), strict=True):
            total, count = sums.kl_of_group.get(sample.trajectory.group_id, (0.0, 0))
            sums.kl_of_group[sample.trajectory.group_id] = (total + float(part.sum()), count + len(part))

    def _guard_kl(self, step: int, sums: _Sums) -> None:
        kl = sums.mean(sums.kl)
        if kl > self._settings.max_kl:
            worst = max(sums.kl_of_group, key=lambda group: sums.kl_of_group[group][0] / sums.kl_of_group[group][1])
            total, count = sums.kl_of_group[worst]
            raise KlExceeded(
                f"step {step}: KL to the behaviour policy is {kl:.3g}, learner.max_kl is {self._settings.max_kl:g}; "
                f"worst is group {worst} with {total / count:.3g}"
            )

    def _update(self, step: int, sums: _Sums) -> None:
        update = self._engine.update(learning_rate(self._settings, step))
        sums.grad_norms.append(update.grad_norm)
        if update.applied:
            self._refused_in_a_row = 0
            return
        self.skipped += 1
        self._refused_in_a_row += 1
        log.warning("step %d: loss or gradient not finite, update skipped (%d in a row)", step, self._refused_in_a_row)
        if self._refused_in_a_row >= PATIENCE:
            raise NonFiniteTraining(
                f"step {step}: loss or gradient was not finite {PATIENCE} times in a row; nothing of it reached the "
                "weights. Lower learner.lr or look at the rewards, then start the learner again"
            )

    def _metrics(self, step: int, sums: _Sums) -> dict[str, float]:
        updates = max(1, len(sums.grad_norms))
        seen = max(1, sums.tokens * self._settings.epochs)
        return {
            "loss": sums.loss / updates,
            "kl": sums.mean(sums.kl),
            "ratio_minus_1": sums.mean(sums.ratio_minus_1),
            "clip_fraction": sums.clipped / seen,
            "capped_fraction": sums.capped / seen,
            "entropy": sums.mean(sums.entropy),
            "grad_norm": float(np.mean(sums.grad_norms)) if sums.grad_norms else 0.0,
            "lr": learning_rate(self._settings, step),
            "trained_tokens": sums.tokens,
            "skipped_updates": self.skipped,
        }
