"""Objectives by the name that `learner.objective` gives them."""

from __future__ import annotations

from forebay.config.learner_section import LearnerSection
from forebay.learner.objectives.cispo import Cispo
from forebay.learner.objectives.gspo import Gspo
from forebay.learner.objectives.objective import Objective
from forebay.learner.objectives.ppo import PpoClip


def objective(settings: LearnerSection) -> Objective:
    """The one that the run file names."""
    clip = PpoClip(clip_low=settings.clip_low, clip_high=settings.clip_high, dual_clip=settings.dual_clip)
    table: dict[str, Objective] = {
        "ppo": clip,
        "gspo": Gspo(clip=clip),
        "cispo": Cispo(clip_low=settings.clip_low, clip_high=settings.clip_high),
    }
    return table[settings.objective]
