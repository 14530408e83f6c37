"""What heartbeats say: one doing, rates since the last beat, and the share of time without work."""

from __future__ import annotations

import pytest

from forebay.sampler.activity import Activity


class Clock:
    """Turned by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates_and_waiting_are_since_the_last_beat() -> None:
    clock = Clock()
    activity = Activity(clock)
    clock.now += 3
    activity.group_started()
    activity.generated(70)
    clock.now += 7
    gauges = activity.take_gauges()
    assert gauges["tokens_per_s"] == pytest.approx(7)
    assert gauges["wait_share"] == pytest.approx(0.3)
    assert gauges["running_groups"] == 1
    clock.now += 4
    activity.group_ended()
    clock.now += 4
    gauges = activity.take_gauges()
    assert gauges["tokens_per_s"] == 0
    assert gauges["wait_share"] == pytest.approx(0.5)


def test_doing_is_timed_from_its_beginning() -> None:
    clock = Clock()
    activity = Activity(clock)
    activity.now("generating")
    clock.now += 5
    activity.now("generating")
    assert activity.since_s == 5
    activity.now("waiting: learner to publish step 3")
    assert (activity.doing, activity.since_s) == ("waiting: learner to publish step 3", 0)
