"""How often a step waits for the device: for each update, not for each micro-batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.learner.models import random_groups
from tests.learner.trainers import batch_of, run_file, trainer_of

#: What brings numbers to the host. On a CPU nothing has to be waited for, but the calls are the same.
FETCHING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}


class Fetches(TorchDispatchMode):
    """Counts them by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        plain = torch.Tensor.cpu

        def cpu(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
            self.found["cpu"] += 1
            return plain(tensor, *given, **named)

        monkeypatch.setattr(torch.Tensor, "cpu", cpu)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name in FETCHING:
            self.found[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 0},
        {"zero_stage": 2, "epochs": 2, "minibatches": 2, "kl_coef": 0.1, "entropy_coef": 0.01},
        {"preset": "ppo", "kl_coef": 0.1, "kl_in": "reward", "minibatch_trajectories": 6, "zero_stage": 1},
    ],
)
def test_more_micro_batches_are_no_more_waits(
    model_folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for tokens in (30, 10_000):
        trainer, _ = trainer_of(run_file(model_folder, **settings, tokens_per_microbatch=tokens))
        batch = batch_of(random_groups(1, groups=6, top_p=0.9))
        trainer.train(1, batch)
        with monkeypatch.context() as patch, Fetches(patch) as fetches:
            trainer.train(2, batch)
        found[tokens] = fetches.found
    assert found[30] == found[10_000]
    assert found[30]["cpu"] > 0
