"""Two ranks learn what one learns: at every ZeRO stage, with and without a critic, with uneven shares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forebay.fleet.ranks import run_ranks
from forebay.learner.ranks import ALONE
from tests.learner.rank_worker import CASES, Outcome, train

#: Adam makes of a gradient near 0 a step of the learning rate or none: sums in another order are seen there first.
MEAN_NOISE, MOST_NOISE = {"float32": 2e-7, "bfloat16": 1e-5}, {"float32": 1e-4, "bfloat16": 2e-3}
RELATIVE_NOISE = {"float32": 1e-4, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def two_ranks(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have written what came of every case."""
    folder = tmp_path_factory.mktemp("ranks")
    worker = [sys.executable, "-m", "tests.learner.rank_worker", str(model_folder), str(folder)]
    assert run_ranks(worker, 2) == 0
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_learns(case: str, two_ranks: Path, model_folder: Path) -> None:
    alone, together = train(case, model_folder, ALONE), outcome_of(two_ranks / f"{case}.pt")
    dtype = str(CASES[case].get("compute_dtype", "float32"))
    for ours, theirs in zip(alone.metrics, together.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=RELATIVE_NOISE[dtype], abs=RELATIVE_NOISE[dtype] / 10)
    assert_near(alone.state, together.state, dtype)


@pytest.mark.parametrize("case", ["optimizer", "gradients", "weights"])
def test_every_zero_stage_learns_the_same(case: str, two_ranks: Path) -> None:
    whole, parted = outcome_of(two_ranks / "whole.pt"), outcome_of(two_ranks / f"{case}.pt")
    for ours, theirs in zip(whole.metrics, parted.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert_near(whole.state, parted.state, "float32")


def outcome_of(path: Path) -> Outcome:
    metrics, state = torch.load(path)
    return Outcome(metrics=metrics, state=state)


def assert_near(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], dtype: str) -> None:
    assert one.keys() == other.keys()
    for name in masters(one):
        difference = (one[name] - other[name]).abs()
        assert float(difference.mean()) < MEAN_NOISE[dtype], name
        assert float(difference.max()) < MOST_NOISE[dtype], name


def masters(state: dict[str, torch.Tensor]) -> Iterator[str]:
    return (name for name in state if "master/" in name)
