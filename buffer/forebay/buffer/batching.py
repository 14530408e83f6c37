"""Which groups a step trains: a pure function of the State."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.buffer.ledger import State
from forebay.buffer.rules import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """Groups to drop as too stale, and the batch, empty while `missing` groups are still to come."""

    stale: tuple[int, ...]
    chosen: tuple[int, ...]
    missing: int


def compose(state: State, rules: Rules, step: int) -> Composition:
    """The batch of `step` from what is buffered: exactly B groups, the oldest versions first, then in order of arrival.

    Staleness at step k is (k − 1) − step of the oldest token's version: the steps between the weights being trained
    and those that generated it, the time in the queue included.
    """
    groups = [state.groups[group_id] for group_id in state.buffered]
    stale = tuple(sorted(group.group_id for group in groups if step - 1 - group.step > rules.max_staleness))
    fresh = sorted(
        (group for group in groups if step - 1 - group.step <= rules.max_staleness),
        key=lambda group: (group.step, group.arrival),
    )
    missing = max(0, rules.groups_per_step - len(fresh))
    chosen = () if missing else tuple(group.group_id for group in fresh[: rules.groups_per_step])
    return Composition(stale=stale, chosen=chosen, missing=missing)


def final_step(state: State, rules: Rules, checkpoint_step: int) -> int:
    """Batches up to here are never replayed once `checkpoint_step` is saved: the oldest checkpoint that is kept."""
    kept = [step for step in state.checkpoints if step < checkpoint_step] + [checkpoint_step]
    return kept[-rules.keep_checkpoints] if len(kept) >= rules.keep_checkpoints and checkpoint_step else state.final
