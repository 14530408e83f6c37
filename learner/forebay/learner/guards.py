"""What never goes on quietly: updates that are not finite, drift, rewards that tell nothing apart."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np

from forebay.learner.advantages.statistics import ZERO_SPREAD
from forebay.learner.batch import by_group
from forebay.learner.drift import Drift
from forebay.learner.engine import Update
from forebay.learner.errors import KlExceeded, NonFiniteTraining
from forebay.wire.trajectory import Trajectory

#: Updates refused in a row after which training has failed.
PATIENCE = 3
FROM_CHECKPOINT = "Start the learner again to go on from the last checkpoint"

log = logging.getLogger(__name__)


class Refusals:
    """Counts updates of one role that were refused because they were not finite."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._in_a_row = 0
        self.total = 0

    def note(self, step: int, update: Update) -> None:
        """Raises NonFiniteTraining after PATIENCE refused updates in a row; one that float16's loss scale caused is
        counted and no sign of trouble."""
        if update.applied:
            self._in_a_row = 0
            return
        self.total += 1
        if update.rescaled:
            log.info(
                "step %d: %s gradient too large for float16, update skipped and loss scale lowered", step, self._role
            )
            return
        self._in_a_row += 1
        log.warning(
            "step %d: %s loss or gradient not finite, update skipped (%d in a row)", step, self._role, self._in_a_row
        )
        if self._in_a_row >= PATIENCE:
            raise NonFiniteTraining(
                f"step {step}: the {self._role}'s loss or gradient was not finite {PATIENCE} times in a row; nothing "
                "of it reached the weights. Lower learner.lr or look at the rewards, then start the learner again"
            )


def guard_kl(step: int, drift: Drift, limit: float) -> None:
    """Raises KlExceeded. A KL that is no number is no drift: the update itself is refused then."""
    mean = drift.mean()
    if mean > limit:
        raise KlExceeded(
            f"step {step}: KL to the behaviour policy is {mean:.3g}, learner.max_kl is {limit:g}; {drift.told(limit)}"
        )


def guard_weights(step: int, role: str, spoiled: Sequence[str]) -> None:
    """`spoiled`: names of the weights that are not finite. Raises NonFiniteTraining when there is one."""
    if spoiled:
        raise NonFiniteTraining(
            f"step {step}: {len(spoiled)} of the {role}'s weights are not finite after the step, {spoiled[0]} first; "
            f"they are not published. {FROM_CHECKPOINT}"
        )


def guard_answers(step: int, drift: Drift, limit: float) -> None:
    """Listen to new weights before anyone else does. Raises KlExceeded, or NonFiniteTraining when they answer NaN."""
    mean = drift.mean()
    if not math.isfinite(mean):
        raise NonFiniteTraining(
            f"step {step}: the updated weights give log-probabilities that are not finite; they are not published. "
            f"{FROM_CHECKPOINT}"
        )
    if mean > limit:
        raise KlExceeded(
            f"step {step}: after its updates the KL to the behaviour policy is {mean:.3g}, learner.max_kl is "
            f"{limit:g}; the updated weights are not published; {drift.told(limit)}"
        )


def flat_groups(trajectories: Sequence[Trajectory]) -> list[bool]:
    """Of each group, whether its rewards are all the same."""
    groups = by_group(trajectories).values()
    return [float(np.std([member.reward for member in group])) < ZERO_SPREAD for group in groups]


class DegenerateRewards:
    """Raises an alarm when no group of `patience` steps in a row told its members apart."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._in_a_row = 0

    def note(self, step: int, flat: Sequence[bool]) -> dict[str, float]:
        """`flat`: of each group, whether it told nothing apart. Their share, and for how many steps it has been all."""
        self._in_a_row = self._in_a_row + 1 if all(flat) else 0
        if self._in_a_row and self._in_a_row % self._patience == 0:
            log.warning(
                "step %d: no group of the last %d steps has rewards that differ: nothing can be learned from them; "
                "look at the task and its reward, or at a collapsed policy", step, self._in_a_row,
            )  # fmt: skip
        return {"zero_variance_groups": float(np.mean(flat)), "degenerate_steps": self._in_a_row}
