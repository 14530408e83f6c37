"""The batch of a step, at the edge of the staleness bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from forebay.buffer.batching import compose
from forebay.buffer.ledger import Group, State
from forebay.buffer.rules import Rules
from forebay.buffer.tally import Counts
from forebay.wire.version import Version


def test_the_last_fresh_step_is_trained_and_the_first_stale_one_dropped() -> None:
    state = State()
    for group_id, step in enumerate((5, 4, 3, 6)):
        state.groups[group_id] = Group(
            group_id=group_id,
            lsn=group_id,
            index=0,
            fleet="f",
            oldest=Version(1, step),
            step=step,
            counts=Counts(1, 2, 3),
        )
        state.buffered.add(group_id)
    rules = cast(Rules, cast(Any, SimpleNamespace(max_staleness=2, groups_per_step=2)))
    found = compose(state, rules, step=7)  # trains the weights of step 6: staleness 1, 2, 3 and 0
    assert found.stale == (2,)
    assert found.chosen == (1, 0), "the oldest fresh versions first"
    assert found.missing == 0
