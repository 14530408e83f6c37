"""Ranks on two nodes of a Ray cluster learn what ranks of one machine learn. Not part of `make test`: `make prove`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forebay.fleet.ranks import run_ranks
from tests.fleet.test_ray_ranks import address, ended, launched
from tests.learner.models import tiny_llama
from tests.learner.test_ranks import assert_near, outcome_of

__all__ = ["address"]  # the cluster, a fixture
pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]


def test_they_learn_what_local_ranks_learn(address: str, tmp_path: Path) -> None:
    """ZeRO 3, over gloo between the nodes; one case, for `tests/learner/test_ranks.py` has all."""
    tiny_llama().save_pretrained(tmp_path / "model")
    found = []
    for where in ("ray", "here"):
        (tmp_path / where).mkdir()
        words = ["-m", "tests.learner.rank_worker", str(tmp_path / "model"), str(tmp_path / where), "weights"]
        if where == "ray":
            code, told = ended(launched(address, 2, *words))
            assert code == 0, told
        else:
            assert run_ranks([sys.executable, *words], 2) == 0
        found.append(outcome_of(tmp_path / where / "weights.pt"))
    by_ray, here = found
    assert_near(by_ray.state, here.state, "float32")
    assert by_ray.metrics == [pytest.approx(step, rel=1e-4, abs=1e-5) for step in here.metrics]
