"""Means and deviations that one bad number does not spoil."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forebay.learner.advantages.episode import Floats, Group

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


def normalized(values: Floats) -> Floats:
    """(value - mean) / population deviation over all finite values; 0 for the others and where nothing differs."""
    known = np.isfinite(values)
    if not known.any() or (deviation := float(values[known].std())) < ZERO_SPREAD:
        return np.zeros(len(values))
    return np.where(known, (values - values[known].mean()) / deviation, 0.0)


def normalized_tokens(groups: list[list[Floats]]) -> list[list[Floats]]:
    """`normalized` over every token of every trajectory, in the same shape."""
    arrays = [array for group in groups for array in group]
    flat = normalized(np.concatenate(arrays)) if arrays else np.zeros(0)
    parts = iter(np.split(flat, np.cumsum([len(array) for array in arrays])[:-1]))
    return [[next(parts) for _ in group] for group in groups]
