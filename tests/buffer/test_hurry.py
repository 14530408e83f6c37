"""A buffer that is away: everybody waits for it, except who was asked to stop."""

from __future__ import annotations

import itertools

import pytest

from forebay.buffer.client import BlockingClient, Unreachable
from forebay.loopback import free_addresses


def test_a_buffer_that_is_away_is_given_up_in_a_hurry_and_not_before() -> None:
    seconds, hurried, told = itertools.count(0.0, 7.0), False, list[str]()

    def trouble(line: str) -> None:
        nonlocal hurried
        told.append(line)
        hurried = len(told) == 2

    clock = lambda: next(seconds)  # noqa: E731 - each look at it is 7 s later
    with (
        BlockingClient(free_addresses(1)[0], clock=clock, on_trouble=trouble, in_a_hurry=lambda: hurried) as client,
        pytest.raises(Unreachable, match=r"unreachable for \d+ s"),
    ):
        client.status()
    assert len(told) >= 2, "until then it was tried again, and said"


def test_a_hurry_does_not_give_up_what_has_only_just_gone() -> None:
    seconds, tries = itertools.count(0.0, 4.0), list[float]()

    def clock() -> float:
        tries.append(next(seconds))
        return tries[-1]

    with (
        BlockingClient(
            free_addresses(1)[0], clock=clock, on_trouble=lambda line: None, in_a_hurry=lambda: True
        ) as client,
        pytest.raises(Unreachable),
    ):
        client.status()
    assert len(tries) > 2, "ten seconds are more than two tries"
