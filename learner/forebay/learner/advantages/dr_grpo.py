"""Group-relative advantages without the division, which favours questions that are nearly solved or nearly hopeless
(Dr. GRPO, arXiv 2503.20783). Its other half is `loss_aggregation = "fixed"`.

    A_i = r_i - mean(r)
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.learner.advantages.episode import Floats, Group, constant
from forebay.learner.advantages.statistics import centred


def dr_grpo(groups: Sequence[Group]) -> list[list[Floats]]:
    """An `Estimator`."""
    return [constant(group, centred(group).values) for group in groups]
