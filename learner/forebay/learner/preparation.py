"""From a batch of trajectories to samples: what is known of them before the first update of their step.

Shape suffixes: t trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from forebay.config.models import RunFile
from forebay.learner.advantages.episode import Episode, Floats
from forebay.learner.advantages.gae import gae_returns
from forebay.learner.advantages.rewards import RewardShaping
from forebay.learner.advantages.table import estimator
from forebay.learner.batch import by_group
from forebay.learner.corrections.group_expectation import expected_logprob
from forebay.learner.kl import ESTIMATES
from forebay.learner.packing import MicroBatch, idle, on_host, pack
from forebay.learner.roles import Roles
from forebay.learner.sample import Floats32, Sample, by_sample
from forebay.obs.phases import PhaseClock
from forebay.wire.trajectory import Trajectory

Groups = list[list[Sample]]


class Preparation:
    """Scores a batch with the models as the step begins and estimates its advantages. All calls are collective."""

    def __init__(self, roles: Roles, run: RunFile, clock: PhaseClock) -> None:
        self._roles, self._settings, self._clock = roles, run.learner, clock
        self._shaping = RewardShaping.of(run, roles.ranks)
        self._estimate = estimator(run.learner, roles.ranks)
        self._kl_in_reward = run.learner.kl_coef > 0 and run.learner.kl_in == "reward"
        #: Without entropy bonus, KL in the loss and critic, a zero advantage has no gradient.
        self.needs_all = bool(
            run.learner.entropy_coef or (run.learner.kl_coef and not self._kl_in_reward) or roles.critic
        )

    def groups(self, trajectories: Sequence[Trajectory], *, several_updates: bool) -> Groups:
        """The batch as groups, in the order of their first members, with every column that the step needs."""
        rewards = dict(zip(map(id, trajectories), self._shaping(trajectories), strict=True))
        groups = [_bare(group) for group in by_group(trajectories).values()]
        if self._kl_in_reward or self._roles.critic:
            return self._with_advantages(self._scored(groups, proximal=True), rewards)
        return self._scored(self._with_advantages(groups, rewards), proximal=several_updates)

    def useful(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those that have a gradient."""
        return [sample for sample in samples if self.needs_all or sample.teaches]

    def packed(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Micro-batches of the useful ones, where the weights are; as many on each rank. A collective call."""
        batches = pack(self.useful(samples), self._settings.tokens_per_microbatch)
        batches += [idle()] * (max(self._roles.ranks.gathered(len(batches))) - len(batches))
        return [replace(batch.to(self._roles.actor.device), team=self._roles.ranks.team) for batch in batches]

    def _scored(self, groups: Groups, *, proximal: bool) -> Groups:
        columns: dict[str, Callable[[MicroBatch], torch.Tensor]] = {}
        if proximal:
            columns["proximal_t"] = lambda batch: self._roles.actor.score(batch)[0]
        if self._roles.reference is not None:
            columns["reference_t"] = self._roles.reference.logprobs
        if self._roles.critic is not None:
            columns["value_t"] = self._roles.critic.score
        if not columns:
            return groups
        known: dict[int, dict[str, Any]] = {}
        batches = self.packed([sample for group in groups for sample in group])
        for name, score in columns.items():
            for sample, part in self._column(batches, score):
                known.setdefault(id(sample), {})[name] = part
        if self._roles.reference is not None:
            self._roles.reference.rest()
        return [[replace(sample, **known.get(id(sample), {})) for sample in group] for group in groups]

    def _column(
        self, batches: Sequence[MicroBatch], score: Callable[[MicroBatch], torch.Tensor]
    ) -> Iterator[tuple[Sample, Floats32]]:
        with self._clock.phase("forward"), torch.no_grad():
            found = on_host([score(batch).float() for batch in batches])
        for batch, values_t in zip(batches, found, strict=True):
            yield from by_sample(batch.samples, values_t)

    def _with_advantages(self, groups: Groups, rewards: dict[int, float]) -> Groups:
        episodes = [[self._episode(sample, rewards[id(sample.trajectory)]) for sample in group] for group in groups]
        advantages = self._estimate(episodes)
        return [
            [self._taught(*member) for member in zip(group, found, outcomes, strict=True)]
            for group, found, outcomes in zip(groups, advantages, episodes, strict=True)
        ]

    def _episode(self, sample: Sample, reward: float) -> Episode:
        value_t = np.zeros(0) if self._roles.critic else None  # of a trajectory without a trained token
        if sample.value_t is not None:
            value_t = sample.value_t.astype(np.float64)
        return Episode(reward=reward, tokens=sample.targets, penalty_t=self._penalty(sample), value_t=value_t)

    def _penalty(self, sample: Sample) -> Floats | None:
        if not self._kl_in_reward or not sample.targets:
            return None
        this_t, other_t = (torch.from_numpy(x).double() for x in (sample.proximal_t, sample.reference_t))
        estimate_t = ESTIMATES[self._settings.kl_estimator](this_t, other_t)
        return np.asarray(self._settings.kl_coef * estimate_t.numpy(), np.float64)

    def _taught(self, sample: Sample, advantage_t: Floats, episode: Episode) -> Sample:
        taught = replace(sample, advantage_t=advantage_t.astype(np.float32))
        if episode.value_t is None:
            return taught
        return_t = gae_returns(episode, self._settings.gamma, self._settings.lam)
        return replace(taught, return_t=return_t.astype(np.float32))


def _bare(group: list[Trajectory]) -> list[Sample]:
    expected = expected_logprob(group)
    return [Sample(trajectory=trajectory, expected=expected) for trajectory in group]
