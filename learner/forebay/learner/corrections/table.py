"""Corrections by the name that `learner.correction` gives them."""

from __future__ import annotations

from functools import partial

from forebay.config.learner_section import LearnerSection
from forebay.learner.corrections.correction import Correction
from forebay.learner.corrections.decoupled import decoupled
from forebay.learner.corrections.group_expectation import group_expectation
from forebay.learner.corrections.icepop import icepop
from forebay.learner.corrections.none import none
from forebay.learner.corrections.sequence_mask import sequence_mask
from forebay.learner.corrections.truncated_is import truncated_is


def correction(settings: LearnerSection) -> Correction:
    """The one that the run file names."""
    table: dict[str, Correction] = {
        "none": none,
        "truncated_is": partial(truncated_is, cap=settings.importance_cap),
        "icepop": partial(icepop, low=settings.icepop_low, high=settings.icepop_high),
        "sequence_mask": partial(sequence_mask, limit=settings.sequence_limit, cap=settings.importance_cap),
        "group_expectation": group_expectation,
        "decoupled": decoupled,
    }
    return table[settings.correction]
