"""Where drift comes from: the KL to the behaviour policy, by who generated the tokens.

Shape suffixes: t trained tokens of a micro-batch or of a sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.learner.ranks import ALONE, Ranks
from forebay.learner.sample import Sample, by_sample
from forebay.wire.version import Version

Floats = NDArray[np.float64]
Source = tuple[str, Version]  #: a fleet, and the weights that it generated with


@dataclass(slots=True)
class Share:
    """Some of the tokens."""

    kl: float = 0.0  #: summed
    tokens: int = 0

    @classmethod
    def sum(cls, parts: Iterable[Share]) -> Share:
        """All of them together."""
        whole = cls()
        for part in parts:
            whole.add(part.kl, part.tokens)
        return whole

    def add(self, kl: float, tokens: int) -> None:
        """Take more in."""
        self.kl += kl
        self.tokens += tokens

    def beyond(self, limit: float) -> float:
        """How much of what lifts the mean of everything above `limit` is here; negative where it holds it down."""
        return self.kl - limit * self.tokens


class Drift:
    """The KL at the trained tokens of one minibatch; `fleets`: of each group. Who it comes from is found when asked."""

    def __init__(self, task: str, fleets: Mapping[int, str], ranks: Ranks = ALONE) -> None:
        self._task, self._fleets, self._ranks = task, fleets, ranks
        self._measured: list[tuple[Sequence[Sample], Floats]] = []

    def add(self, samples: Sequence[Sample], kl_t: Floats) -> None:
        """Take a micro-batch in: the KL at each trained token of its samples."""
        self._measured.append((samples, kl_t))

    def mean(self) -> float:
        """KL a token; 0 when there is none. A collective call."""
        tokens = sum(len(kl_t) for _, kl_t in self._measured)
        kl = sum(float(kl_t.sum()) for _, kl_t in self._measured)
        return self._ranks.total(kl) / max(1.0, self._ranks.total(tokens))

    def told(self, limit: float) -> str:
        """In words: the fleet, version, task and group that lift the mean above `limit` most. A collective call."""
        shares: dict[Source, dict[int, Share]] = {}
        for of_rank in self._ranks.gathered(self._shares()):  # a group is on one rank
            for source, groups in of_rank.items():
                shares.setdefault(source, {}).update(groups)
        wholes = {source: Share.sum(groups.values()) for source, groups in shares.items()}
        (fleet, version), share = max(wholes.items(), key=lambda item: item[1].beyond(limit))
        groups = shares[fleet, version]
        group = max(groups, key=lambda group: groups[group].beyond(limit))
        return (
            f"most of it comes from fleet {fleet}, version {version}, task {self._task} "
            f"({share.kl / share.tokens:.3g} over {share.tokens} tokens, group {group} before all)"
        )

    def _shares(self) -> dict[Source, dict[int, Share]]:
        """By source and group."""
        shares: dict[Source, dict[int, Share]] = {}
        for samples, measured_t in self._measured:
            for sample, kl_t in by_sample(samples, measured_t):
                trajectory, span_t = sample.trajectory, sample.span_t
                for index in np.unique(span_t):
                    source = (self._fleets[trajectory.group_id], trajectory.spans[index].version)
                    of_source_t = kl_t[span_t == index]
                    groups = shares.setdefault(source, {})
                    groups.setdefault(trajectory.group_id, Share()).add(float(of_source_t.sum()), len(of_source_t))
        return shares
