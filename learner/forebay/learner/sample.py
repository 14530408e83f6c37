"""A trajectory with everything that its step knows of it.

Shape suffixes: t trained tokens of the trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from forebay.wire.trajectory import Trajectory

Floats32 = NDArray[np.float32]
F = TypeVar("F", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """Columns that the step does not need are None."""

    trajectory: Trajectory
    advantage_t: Floats32 | None = None
    proximal_t: Floats32 | None = None  #: the learner's log-probabilities as the step began
    reference_t: Floats32 | None = None  #: the reference model's
    value_t: Floats32 | None = None  #: the critic's values as the step began
    return_t: Floats32 | None = None  #: what the critic is to learn
    expected: float = 0.0  #: see corrections.group_expectation.expected_logprob

    @property
    def targets(self) -> int:
        """t: how many of its tokens are trained."""
        return int(np.count_nonzero(self.trajectory.loss_mask))

    @property
    def span_t(self) -> NDArray[np.int64]:
        """Which of the trajectory's version spans each trained token lies in."""
        starts = [span.start for span in self.trajectory.spans]
        index = np.repeat(np.arange(len(starts)), np.diff([*starts, len(self.trajectory.tokens)]))
        return index[self.trajectory.loss_mask]

    @property
    def teaches(self) -> bool:
        """Whether its advantage is anything but 0."""
        return self.advantage_t is None or bool(self.advantage_t.any())


def by_sample(samples: Sequence[Sample], values_t: NDArray[F]) -> Iterator[tuple[Sample, NDArray[F]]]:
    """Each sample with its part of what a micro-batch has at every trained token."""
    parts = np.split(values_t, np.cumsum([sample.targets for sample in samples])[:-1])
    return zip(samples, parts, strict=True)


def with_advantage(trajectory: Trajectory, advantage: float) -> Sample:
    """A sample with the same advantage at each token."""
    targets = int(np.count_nonzero(trajectory.loss_mask))
    return Sample(trajectory=trajectory, advantage_t=np.full(targets, advantage, np.float32))
