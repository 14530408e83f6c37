"""REINFORCE++-baseline (arXiv 2501.03262): the group's mean as baseline, the batch's deviation as scale.

    A_i = (r_i - mean_group(r)) / std_batch(r - mean_group(r))

over the trajectories of the batch. Unlike GRPO's own deviation of each group, this one weighs a group with little
spread less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from forebay.learner.advantages.episode import Floats, Group, constant
from forebay.learner.advantages.statistics import ZERO_SPREAD, centred
from forebay.learner.ranks import ALONE, Ranks


def reinforce_pp_baseline(groups: Sequence[Group], ranks: Ranks = ALONE) -> list[list[Floats]]:
    """An `Estimator`, once `ranks` are given. A collective call."""
    values = [centred(group).values for group in groups]
    finite = sum(math.isfinite(episode.outcome) for group in groups for episode in group)
    # Every group is centred, so the batch is too; not subtracting its mean again leaves silent groups at exactly 0.
    squares = ranks.total(sum(float(np.square(value).sum()) for value in values))
    deviation = math.sqrt(squares / max(1.0, ranks.total(finite)))
    scale = 1 / deviation if deviation >= ZERO_SPREAD else 0.0
    return [constant(group, value * scale) for group, value in zip(groups, values, strict=True)]
