"""One step: from a batch of trajectories to updated weights, and what happened on the way.

Shape suffixes: t trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from forebay.config.models import RunFile
from forebay.learner.critic import critic_settings, value_loss
from forebay.learner.guards import DegenerateRewards, Refusals, guard_kl, guard_new_weights
from forebay.learner.kl import k3
from forebay.learner.loss import PolicyLoss
from forebay.learner.lr import learning_rate
from forebay.learner.meter import Measured, StepMeter
from forebay.learner.packing import MicroBatch
from forebay.learner.preparation import Groups, Preparation
from forebay.learner.roles import Roles
from forebay.learner.sample import Sample
from forebay.learner.tokens import Tokens, Totals
from forebay.obs.phases import PhaseClock
from forebay.wire.trajectory import Trajectory

#: Part of a step's groups on which updated weights are looked at before anyone gets them.
PROBE = 16
#: Trajectories an update where minibatch_trajectories is "auto": up to so many parameters, and beyond.
LARGE_MODEL, AUTO_SMALL, AUTO_LARGE = 10_000_000_000, 1024, 512


class Trainer:
    """Owns how a batch becomes updates: a pure function of the engines' state and the batch."""

    def __init__(self, roles: Roles, run: RunFile, clock: PhaseClock) -> None:
        self._roles, self._settings, self._clock = roles, run.learner, clock
        self._critic_settings = critic_settings(run.learner)
        self._seed = run.run.seed
        self._preparation = Preparation(roles, run, clock)
        self._loss = PolicyLoss.of(run)
        self._refused, self._critic_refused = Refusals("policy"), Refusals("critic")
        self._degenerate = DegenerateRewards(run.learner.degenerate_steps)
        self._skipped_before = 0

    @property
    def skipped(self) -> int:
        """Updates refused since the weights were new."""
        return self._skipped_before + self._refused.total + self._critic_refused.total

    def resume(self, skipped: int) -> None:
        """Go on counting from what a checkpoint says."""
        self._skipped_before = skipped

    def train(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Train one batch in place; returns its metrics.

        Raises KlExceeded before an update that would start from too far away and when the updated weights are too far
        away, NonFiniteTraining after several refused updates in a row and when the updated weights are spoiled.
        """
        meter, parts = StepMeter(), self._updates_an_epoch(trajectories)
        groups = self._preparation.groups(trajectories, several_updates=self._settings.epochs * parts > 1)
        for index, samples in enumerate(self._minibatches(step, groups, parts)):
            self._minibatch(step, samples, meter, first=index < parts)
        self._probe(step, groups)
        return {
            **meter.metrics(step),
            **self._degenerate.note(step, trajectories),
            "lr": learning_rate(self._settings, step),
            "skipped_updates": self.skipped,
        }

    def _updates_an_epoch(self, trajectories: Sequence[Trajectory]) -> int:
        wanted, groups = self._settings.minibatch_trajectories, len({t.group_id for t in trajectories})
        if wanted is None:
            return min(self._settings.minibatches, groups)
        if wanted == "auto":
            parameters = sum(p.numel() for p in self._roles.actor.module.parameters())
            wanted = AUTO_SMALL if parameters < LARGE_MODEL else AUTO_LARGE
        return min(-(-len(trajectories) // wanted), groups)

    def _minibatches(self, step: int, groups: Groups, parts: int) -> Iterator[list[Sample]]:
        """Whole groups, shuffled anew each epoch when there are several updates in it."""
        random = np.random.default_rng((self._seed, step))
        for _ in range(self._settings.epochs):
            order = random.permutation(len(groups)) if parts > 1 else np.arange(len(groups))
            for part in np.array_split(order, parts):
                yield [sample for index in part for sample in groups[index]]

    def _minibatch(self, step: int, samples: list[Sample], meter: StepMeter, *, first: bool) -> None:
        batches = self._preparation.packed(samples)
        if not batches:
            return
        totals = Totals(
            tokens=sum(sample.targets for sample in samples), sequences=sum(1 for sample in samples if sample.targets)
        )
        kl = sum(self._policy_pass(batch, totals, meter, first) for batch in batches)
        guard_kl(step, kl / sum(batch.targets for batch in batches), self._settings.max_kl, meter)
        for batch in batches if self._roles.critic else ():
            self._critic_pass(batch, totals, meter)
        with self._clock.phase("optimizer"):
            self._update(step, meter)

    def _policy_pass(self, batch: MicroBatch, totals: Totals, meter: StepMeter, first: bool) -> float:
        """Forward, backward, measure; returns the sum of KL."""
        with self._clock.phase("forward"):
            logprob_t, entropy_t = self._roles.actor.score(batch)
            tokens = tokens_of(batch, logprob_t)
            loss = self._loss(tokens, entropy_t, batch.reference_t, totals)
        with self._clock.phase("backward"):
            self._roles.actor.accumulate(loss)
        meter.loss += float(loss.detach())
        return meter.add(self._measured(tokens, entropy_t, batch.samples), first=first)

    def _critic_pass(self, batch: MicroBatch, totals: Totals, meter: StepMeter) -> None:
        critic = self._roles.critic
        assert critic is not None
        assert batch.value_t is not None
        assert batch.return_t is not None
        with self._clock.phase("forward"):
            value_t = critic.score(batch)
            loss = value_loss(value_t, batch.value_t, batch.return_t, self._settings.critic.value_clip, totals.tokens)
        with self._clock.phase("backward"):
            critic.accumulate(loss)
        meter.value_loss += float(loss.detach())

    def _measured(self, tokens: Tokens, entropy_t: torch.Tensor, samples: Sequence[Sample]) -> Measured:
        with torch.no_grad():
            columns = {
                "current_t": tokens.current_t,
                "proximal_t": tokens.proximal_t,
                "behaviour_t": tokens.behaviour_t,
                "entropy_t": entropy_t,
                "weight_t": self._loss.correction(tokens),
                "clipped_t": self._loss.objective.clipped(tokens),
            }
            return Measured.of(columns, samples)

    def _update(self, step: int, meter: StepMeter) -> None:
        update = self._roles.actor.update(learning_rate(self._settings, step))
        meter.grad_norms.append(update.grad_norm)
        self._refused.note(step, update)
        if self._roles.critic is not None:
            update = self._roles.critic.update(learning_rate(self._critic_settings, step))
            meter.critic_grad_norms.append(update.grad_norm)
            self._critic_refused.note(step, update)

    def _probe(self, step: int, groups: Groups) -> None:
        """A forward pass of the new weights over a few groups: what nobody should generate with is not published."""
        taught = [group for group in groups if self._preparation.useful(group)]
        few = taught[: -(-len(taught) // PROBE)]
        batches = self._preparation.packed([sample for group in few for sample in group])
        targets, kl = sum(batch.targets for batch in batches), 0.0
        for batch in batches:
            with self._clock.phase("forward"), torch.no_grad():
                kl += float(k3(batch.behaviour_t, self._roles.actor.score(batch)[0]).double().sum())
        if targets:
            guard_new_weights(step, kl / targets, self._settings.max_kl)


def tokens_of(batch: MicroBatch, logprob_t: torch.Tensor) -> Tokens:
    """What the loss sees; where nobody has scored the batch before, proximal is current."""
    assert batch.advantage_t is not None
    return Tokens(
        current_t=logprob_t,
        proximal_t=logprob_t.detach() if batch.proximal_t is None else batch.proximal_t,
        behaviour_t=batch.behaviour_t,
        advantage_t=batch.advantage_t,
        sequences=batch.sequences,
        expected_b=batch.expected_b,
    )
