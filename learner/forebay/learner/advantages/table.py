"""Estimators by the name that `learner.estimator` gives them."""

from __future__ import annotations

from functools import partial

from forebay.config.learner_section import LearnerSection
from forebay.learner.advantages.dr_grpo import dr_grpo
from forebay.learner.advantages.episode import Estimator
from forebay.learner.advantages.gae import gae
from forebay.learner.advantages.grpo import grpo
from forebay.learner.advantages.reinforce_pp import reinforce_pp
from forebay.learner.advantages.reinforce_pp_baseline import reinforce_pp_baseline
from forebay.learner.advantages.rloo import rloo
from forebay.learner.ranks import ALONE, Ranks


def estimator(settings: LearnerSection, ranks: Ranks = ALONE) -> Estimator:
    """The one that the run file names. What it counts over the batch, it counts over all ranks: a collective call."""
    table: dict[str, Estimator] = {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "rloo": rloo,
        "reinforce_pp": partial(reinforce_pp, gamma=settings.gamma, ranks=ranks),
        "reinforce_pp_baseline": partial(reinforce_pp_baseline, ranks=ranks),
        "gae": partial(gae, gamma=settings.gamma, lam=settings.lam, ranks=ranks),
    }
    return table[settings.estimator]
