"""Which groups a step takes: the staleness bound at its edge, and what each selector promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay.buffer import batching, selectors
from forebay.buffer.ledger import Group, Sampled, State
from forebay.buffer.rules import Rules
from forebay.buffer.tally import Counts
from forebay.wire.version import Version
from tests.buffer.support import make_run


def rules_of(**learner: Any) -> Rules:
    return Rules.of(make_run(Path("unused"), **learner))


def group(group_id: int, *, step: int = 0, arrival_step: int = 0, priority: float = 0.0) -> Group:
    return Group(
        group_id=group_id,
        lsn=group_id,
        index=0,
        fleet="f",
        oldest=Version(1, step),
        step=step,
        arrival_step=arrival_step,
        priority=priority,
        counts=Counts(1, 2, 3),
    )


def state_of(rules: Rules, groups: list[Group]) -> State:
    state = State()
    state.buffered.order_by(selectors.order_of(rules))
    for one in groups:
        state.groups[one.group_id] = one
        state.buffered.add(one)
    return state


GROUPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 1)), min_size=3, max_size=30).map(
    lambda rows: [group(n, step=s, arrival_step=a, priority=p) for n, (s, a, p) in enumerate(rows)]
)


def test_the_last_fresh_step_is_trained_and_the_first_stale_one_dropped() -> None:
    rules = rules_of(max_staleness=2)
    state = state_of(rules, [group(n, step=step) for n, step in enumerate((5, 4, 3, 6))])
    assert batching.stale(state, rules, 7) == [2]  # trains the weights of step 6: staleness 1, 2, 3 and 0
    state.buffered.remove(2)
    assert batching.missing(state, rules) == 0
    assert selectors.choose(state, rules, 7) == (1, 0), "the oldest fresh versions first"


def test_stale_groups_may_be_kept() -> None:
    rules = rules_of(max_staleness=2, stale="keep")
    assert batching.stale(state_of(rules, [group(0, step=0)]), rules, 9) == []


def test_what_is_missing_is_what_a_batch_lacks() -> None:
    rules = rules_of()
    assert batching.missing(state_of(rules, [group(0)]), rules) == 1


@given(groups=GROUPS)
def test_fifo_takes_in_order_of_arrival(groups: list[Group]) -> None:
    rules = rules_of(selector="fifo")
    assert selectors.choose(state_of(rules, groups[::-1]), rules, 1) == (0, 1)


@given(groups=GROUPS)
def test_freshest_takes_none_while_a_fresher_one_waits(groups: list[Group]) -> None:
    rules = rules_of(selector="freshest")
    chosen = selectors.choose(state_of(rules, groups), rules, 1)
    left = [one.step for one in groups if one.group_id not in chosen]
    assert min(groups[n].step for n in chosen) >= max(left)


@given(groups=GROUPS)
def test_oldest_takes_none_while_an_older_one_waits(groups: list[Group]) -> None:
    rules = rules_of(selector="oldest")
    chosen = selectors.choose(state_of(rules, groups), rules, 1)
    left = [one.step for one in groups if one.group_id not in chosen]
    assert max(groups[n].step for n in chosen) <= min(left)


@given(groups=GROUPS, now=st.integers(9, 20), aging=st.floats(0, 1))
def test_priority_takes_those_that_have_the_most_with_their_age(groups: list[Group], now: int, aging: float) -> None:
    rules = rules_of(selector="priority", priority_aging=aging)
    chosen = selectors.choose(state_of(rules, groups), rules, now)

    def worth(one: Group) -> float:
        return one.priority + aging * (now - one.arrival_step)

    left = [worth(one) for one in groups if one.group_id not in chosen]
    assert min(worth(groups[n]) for n in chosen) >= max(left) - 1e-9


def test_aging_lets_nothing_starve() -> None:
    """A dull group against ever new exciting ones: its turn comes once its age is worth the difference."""
    rules = rules_of(selector="priority", priority_aging=0.25, groups_per_step=1)
    state = state_of(rules, [group(0, priority=0.0)])
    for step in range(1, 10):
        state.buffered.add(group(step, priority=1.0, arrival_step=step))
        (chosen,) = selectors.choose(state, rules, step)
        state.buffered.remove(chosen)
        if chosen == 0:
            assert step == 4, "4 steps of 0.25 make up for 1.0; after a tie the earlier one goes first"
            return
    raise AssertionError("the dull group starved")


@dataclass
class Draws:
    """Leases of a uniform selector, as the ledger would note them."""

    state: State
    rules: Rules
    counts: dict[int, int] = field(default_factory=dict)

    def step(self, step: int) -> tuple[int, ...]:
        chosen = selectors.choose(self.state, self.rules, step)
        again = selectors.reusable(self.state, self.rules, chosen)
        for group_id in chosen:
            self.counts[group_id] = self.counts.get(group_id, 0) + 1
            self.state.sampled[group_id] = Sampled(times=self.counts[group_id], live=1)
            if group_id not in again:
                self.state.buffered.remove(group_id)
        return chosen


@given(times=st.integers(1, 4), many=st.integers(2, 12), seed=st.integers(0, 99))
def test_uniform_samples_each_group_as_often_as_allowed_and_never_twice_in_a_batch(
    times: int, many: int, seed: int
) -> None:
    rules = rules_of(selector="uniform", max_times_sampled=times, max_staleness=4)
    draws = Draws(state_of(rules, [group(n) for n in range(many)]), rules)
    step = seed
    while not batching.missing(draws.state, rules):
        chosen = draws.step(step)
        assert len(set(chosen)) == rules.groups_per_step
        step += 1
    assert max(draws.counts.values()) <= times
    assert sum(draws.counts.values()) >= times * (many - 1), "only what is too little for a batch is left"


def test_uniform_draws_every_group_equally_often() -> None:
    rules = rules_of(selector="uniform", groups_per_step=1)
    state = state_of(rules, [group(n) for n in range(10)])
    drawn = [selectors.choose(state, rules, step)[0] for step in range(4000)]
    counts = [drawn.count(n) for n in range(10)]
    assert min(counts) > 320  # of 400: 4 standard deviations
    assert max(counts) < 480
