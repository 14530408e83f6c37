"""Group-relative advantages (GRPO, DeepSeekMath, arXiv 2402.03300).

    A_i = (r_i - mean(r)) / std(r)

over the group, population deviation (divided by G, not G - 1), no epsilon.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.learner.advantages.episode import Floats, Group, constant
from forebay.learner.advantages.statistics import centred


def grpo(groups: Sequence[Group]) -> list[list[Floats]]:
    """An `Estimator`."""
    return [constant(group, _advantages(group)) for group in groups]


def _advantages(group: Group) -> Floats:
    outcomes = centred(group)
    return outcomes.values / outcomes.deviation
