"""One step: from a batch of trajectories to updated weights, and what happened on the way.

Shape suffixes: t trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch

from forebay.config.models import RunFile
from forebay.learner.batch import Batch
from forebay.learner.critic import critic_settings, value_loss
from forebay.learner.drift import Drift
from forebay.learner.engine import Engine
from forebay.learner.guards import DegenerateRewards, Refusals, flat_groups, guard_answers, guard_kl, guard_weights
from forebay.learner.kl import k3
from forebay.learner.loss import PolicyLoss
from forebay.learner.lr import learning_rate
from forebay.learner.meter import Measured, Pass, StepMeter
from forebay.learner.packing import MicroBatch, on_host
from forebay.learner.preparation import Groups, Preparation
from forebay.learner.roles import Roles
from forebay.learner.sample import Sample
from forebay.learner.tokens import Tokens, Totals
from forebay.obs.phases import PhaseClock

#: Part of a step's groups on which updated weights are looked at before anyone gets them.
PROBE = 16
#: Trajectories an update where minibatch_trajectories is "auto": up to so many parameters, and beyond.
LARGE_MODEL, AUTO_SMALL, AUTO_LARGE = 10_000_000_000, 1024, 512


class Trainer:
    """Owns how a batch becomes updates: a pure function of the engines' state and the batch.

    Of several ranks each has its own groups of every minibatch; what is counted, limited and divided by is all ranks'.
    """

    def __init__(self, roles: Roles, run: RunFile, clock: PhaseClock) -> None:
        self._roles, self._settings, self._clock, self._ranks = roles, run.learner, clock, roles.ranks
        self._critic_settings = critic_settings(run.learner)
        self._seed, self._task = run.run.seed, run.task.name
        self._preparation = Preparation(roles, run, clock)
        self._loss = PolicyLoss.of(run)
        self._refused, self._critic_refused = Refusals("policy"), Refusals("critic")
        self._degenerate = DegenerateRewards(run.learner.degenerate_steps)
        self._skipped_before = 0

    @property
    def skipped(self) -> int:
        """Updates refused since the weights were new."""
        return self._skipped_before + self._refused.total + self._critic_refused.total

    def steered(self, run: RunFile) -> Trainer:
        """The same engines, from here on with other coefficients."""
        other = Trainer(self._roles, run, self._clock)
        other.resume(self.skipped)
        return other

    def resume(self, skipped: int) -> None:
        """Go on counting from what a checkpoint says."""
        self._skipped_before = skipped

    def train(self, step: int, batch: Batch) -> dict[str, float]:
        """Train one batch in place; returns its metrics. A collective call.

        Raises KlExceeded before an update that would start from too far away and when the updated weights are too far
        away, NonFiniteTraining after several refused updates in a row and when the updated weights are spoiled.
        """
        meter, parts = StepMeter(), self._updates_an_epoch(batch)
        groups = self._preparation.groups(batch.trajectories, several_updates=self._settings.epochs * parts > 1)
        for index, samples in enumerate(self._minibatches(step, groups, parts, batch.group_ids)):
            drift = Drift(self._task, batch.fleets, self._ranks)
            self._minibatch(step, samples, meter, drift, first=index < parts)
        self._inspect(step, groups, Drift(self._task, batch.fleets, self._ranks))
        flat = self._ranks.gathered(flat_groups(batch.trajectories))
        return {
            **StepMeter.sum(self._ranks.gathered(meter)).metrics(step),
            **self._degenerate.note(step, list(chain.from_iterable(flat))),
            "lr": learning_rate(self._settings, step),
            "skipped_updates": self.skipped,
        }

    def _updates_an_epoch(self, batch: Batch) -> int:
        wanted, groups = self._settings.minibatch_trajectories, len(batch.group_ids)
        if wanted is None:
            return min(self._settings.minibatches, groups)
        if wanted == "auto":
            wanted = AUTO_SMALL if self._roles.actor.parameters < LARGE_MODEL else AUTO_LARGE
        trajectories = int(self._ranks.total(len(batch.trajectories)))
        return min(-(-trajectories // wanted), groups)

    def _minibatches(self, step: int, groups: Groups, parts: int, group_ids: Sequence[int]) -> Iterator[list[Sample]]:
        """This rank's groups of each; the batch's groups are shuffled anew each epoch with several updates in it."""
        random = np.random.default_rng((self._seed, step))
        own = {group[0].trajectory.group_id: group for group in groups}
        for _ in range(self._settings.epochs):
            order = random.permutation(len(group_ids)) if parts > 1 else np.arange(len(group_ids))
            for part in np.array_split(order, parts):
                yield [sample for index in part for sample in own.get(group_ids[index], ())]

    def _minibatch(self, step: int, samples: list[Sample], meter: StepMeter, drift: Drift, *, first: bool) -> None:
        batches = self._preparation.packed(samples)
        if not batches:
            return
        totals = Totals.sum(self._ranks.gathered([sample.targets for sample in samples if sample.targets]))
        passes = [self._policy_pass(batch, totals) for batch in batches]
        with self._clock.phase("backward"):  # an accelerator is waited for here, and nowhere before
            measurements = Measured.of(passes)
        for measured in measurements:
            drift.add(measured.samples, meter.add(measured, first=first))
        guard_kl(step, drift, self._settings.max_kl)
        if self._roles.critic is not None:
            losses = [self._critic_pass(self._roles.critic, batch, totals) for batch in batches]
            meter.value_loss += float(torch.stack(losses).double().sum())
        with self._clock.phase("optimizer"):
            self._update(step, meter)

    def _policy_pass(self, batch: MicroBatch, totals: Totals) -> Pass:
        """Forward and backward; what there is to measure stays where it is."""
        with self._clock.phase("forward"):
            logprob_t, entropy_t = self._roles.actor.score(batch)
            tokens = tokens_of(batch, logprob_t)
            loss = self._loss(tokens, entropy_t, batch.reference_t, totals)
        with self._clock.phase("backward"):
            self._roles.actor.accumulate(loss)
        return Pass(columns=self._columns(tokens, entropy_t), loss=loss.detach(), samples=batch.samples)

    def _critic_pass(self, critic: Engine[torch.Tensor], batch: MicroBatch, totals: Totals) -> torch.Tensor:
        """Forward and backward; the loss."""
        assert batch.value_t is not None
        assert batch.return_t is not None
        with self._clock.phase("forward"):
            value_t = critic.score(batch)
            loss = value_loss(value_t, batch.value_t, batch.return_t, self._settings.critic.value_clip, totals.tokens)
        with self._clock.phase("backward"):
            critic.accumulate(loss)
        return loss.detach()

    def _columns(self, tokens: Tokens, entropy_t: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {
                "current_t": tokens.current_t,
                "proximal_t": tokens.proximal_t,
                "behaviour_t": tokens.behaviour_t,
                "entropy_t": entropy_t,
                "weight_t": self._loss.correction(tokens),
                "clipped_t": self._loss.objective.clipped(tokens),
            }

    def _update(self, step: int, meter: StepMeter) -> None:
        update = self._roles.actor.update(learning_rate(self._settings, step))
        meter.grad_norms.append(update.grad_norm)
        self._refused.note(step, update)
        if self._roles.critic is not None:
            update = self._roles.critic.update(learning_rate(self._critic_settings, step))
            meter.critic_grad_norms.append(update.grad_norm)
            self._critic_refused.note(step, update)

    def _inspect(self, step: int, groups: Groups, drift: Drift) -> None:
        """What nobody should generate with, or train from, is neither published nor saved."""
        for role, engine in (("policy", self._roles.actor), ("critic", self._roles.critic)):
            if engine is not None:
                spoiled = self._ranks.gathered(engine.spoiled())
                guard_weights(step, role, list(dict.fromkeys(chain.from_iterable(spoiled))))
        self._probe(groups, drift)
        guard_answers(step, drift, self._settings.max_kl)

    def _probe(self, groups: Groups, drift: Drift) -> None:
        """A forward pass of the new weights over a few groups."""
        taught = [group for group in groups if self._preparation.useful(group)]
        few = taught[: -(-len(taught) // PROBE)]
        batches = self._preparation.packed([sample for group in few for sample in group])
        with self._clock.phase("forward"), torch.no_grad():
            found = [k3(batch.behaviour_t.double(), self._roles.actor.score(batch)[0].double()) for batch in batches]
            for batch, kl_t in zip(batches, on_host(found), strict=True):
                drift.add(batch.samples, kl_t)


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
