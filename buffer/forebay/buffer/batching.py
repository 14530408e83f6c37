"""Which groups a step trains, and which are too stale to be trained: pure functions of the State."""

from __future__ import annotations

from forebay.buffer.ledger import State
from forebay.buffer.rules import Rules


def stale(state: State, rules: Rules, step: int) -> list[int]:
    """Groups that step `step` must not train.

    Staleness at step k is (k - 1) - step of the oldest token's version: the steps between the weights being trained
    and those that generated it, the time in the queue included.
    """
    return state.buffered.older_than(step - 1 - rules.max_staleness) if rules.drop_stale else []


def missing(state: State, rules: Rules) -> int:
    """How many groups are still to come before a batch can be composed."""
    return max(0, rules.groups_per_step - len(state.buffered))


def final_step(state: State, rules: Rules, checkpoint_step: int) -> int:
    """Batches up to here are never replayed once `checkpoint_step` is saved: the oldest checkpoint that is kept."""
    kept = [step for step in state.checkpoints if step < checkpoint_step] + [checkpoint_step]
    return kept[-rules.keep_checkpoints] if len(kept) >= rules.keep_checkpoints and checkpoint_step else state.final
