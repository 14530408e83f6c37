"""Which rank a process is: what launchers say counts, what a lone learner has said for itself does not."""

from __future__ import annotations

import os

import pytest

from forebay import rank
from forebay.rank import be_alone, is_alone, is_launched, ranks, ranks_here

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", rank.ALONE)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # put back afterwards, whatever the test sets
        monkeypatch.delenv(name)


def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("1", "1", "4", "2", "10.0.0.5", "29500"), strict=False):
        monkeypatch.setenv(name, value)


def test_nobody_launched_it() -> None:
    assert (is_launched(), is_alone()) == (False, False)
    assert (rank.rank(), ranks(), ranks_here()) == (0, 1, 1)


def test_a_launcher_says_which_rank_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch)
    assert is_launched()
    assert (rank.rank(), ranks(), ranks_here()) == (1, 4, 2)


def test_a_lone_learner_is_one_rank_and_its_children_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    be_alone("127.0.0.1", "1234")
    assert os.environ["MASTER_PORT"] == "1234"
    assert (is_launched(), is_alone(), ranks()) == (False, True, 1)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a child
    assert (is_launched(), is_alone()) == (False, False)
    launched(monkeypatch)
    assert is_launched(), "somebody has set it anew"
    assert rank.rank() == 1
