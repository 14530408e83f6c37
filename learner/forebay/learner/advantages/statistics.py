"""Means and deviations that one bad number does not spoil."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forebay.learner.advantages.episode import Floats, Group
from forebay.learner.ranks import ALONE, Ranks

#: Numbers that differ by less than this have told nothing apart.
ZERO_SPREAD = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Centred:
    """The outcomes of a group minus their mean."""

    values: Floats  #: one a member; 0 where the outcome is not finite
    deviation: float  #: population deviation (divided by the number) of the finite ones; 1 where nothing differs
    known: int  #: finite outcomes; 0 where nothing differs


def centred(group: Group) -> Centred:
    """By the rules that hold for every estimator with a group baseline: what is not finite counts for nothing and gets
    0; a group with fewer than two finite outcomes gets 0; a group of equal outcomes gets exactly 0."""
    outcomes = np.asarray([episode.outcome for episode in group], np.float64)
    known = np.isfinite(outcomes)
    if known.sum() < 2 or (deviation := float(outcomes[known].std())) < ZERO_SPREAD:
        return Centred(values=np.zeros(len(outcomes)), deviation=1.0, known=0)
    values = np.where(known, outcomes - outcomes[known].mean(), 0.0)
    return Centred(values=values, deviation=deviation, known=int(known.sum()))


def normalized(values: Floats, ranks: Ranks = ALONE) -> Floats:
    """(value - mean) / population deviation over all finite values, also those of the other ranks; 0 for those that
    are not and where nothing differs. A collective call."""
    known = np.isfinite(values)
    count = max(1.0, ranks.total(int(known.sum())))
    mean = ranks.total(float(values[known].sum())) / count
    deviation = math.sqrt(ranks.total(float(np.square(values[known] - mean).sum())) / count)
    if deviation < ZERO_SPREAD:
        return np.zeros(len(values))
    return np.where(known, (values - mean) / deviation, 0.0)


def normalized_tokens(groups: list[list[Floats]], ranks: Ranks = ALONE) -> list[list[Floats]]:
    """`normalized` over every token of every trajectory, in the same shape. A collective call."""
    arrays = [array for group in groups for array in group]
    flat = normalized(np.concatenate(arrays) if arrays else np.zeros(0), ranks)
    parts = iter(np.split(flat, np.cumsum([len(array) for array in arrays])[:-1]))
    return [[next(parts) for _ in group] for group in groups]
