"""Leave-one-out baseline (RLOO, arXiv 2402.14740): each member against the mean of the others.

A_i = r_i - 1/(G-1) sum_{j != i} r_j  =  G/(G-1) (r_i - mean(r))
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.learner.advantages.episode import Floats, Group, constant
from forebay.learner.advantages.statistics import centred


def rloo(groups: Sequence[Group]) -> list[list[Floats]]:
    """An `Estimator`."""
    return [constant(group, _advantages(group)) for group in groups]


def _advantages(group: Group) -> Floats:
    outcomes = centred(group)
    return outcomes.values * outcomes.known / max(1, outcomes.known - 1)
