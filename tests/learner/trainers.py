"""Trainers on real DeepSpeed engines, made as the learner makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from forebay.config.models import RunFile
from forebay.learner.batch import Batch
from forebay.learner.packing import MicroBatch, pack
from forebay.learner.pretrained import load_model
from forebay.learner.ranks import ALONE, Ranks
from forebay.learner.roles import Roles, load_roles
from forebay.learner.sample import Sample
from forebay.learner.trainer import Trainer
from forebay.obs.phases import PhaseClock
from forebay.wire.trajectory import Trajectory

FLEET = "here"


def run_file(model: Path, **learner: object) -> RunFile:
    """One process, one micro-batch or a few, float32 unless said otherwise."""
    return RunFile.model_validate(
        {
            "run": {"name": "t"}, "model": {"path": str(model)}, "task": {"name": "guess"},
            "sampler": {"max_new_tokens": 17},
            "learner": {
                "max_staleness": 0, "compute_dtype": "float32", "zero_stage": 0, "lr": 1e-3,
                "tokens_per_microbatch": 100, **learner,
            },
        }
    )  # fmt: skip


def trainer_of(run: RunFile, ranks: Ranks = ALONE) -> tuple[Trainer, Roles]:
    """A trainer that has trained nothing yet, and the engines behind it."""
    torch.manual_seed(run.run.seed)
    roles = load_roles(run, load_model(run.model.path), ranks)
    return Trainer(roles, run, PhaseClock()), roles


def batch_of(trajectories: Sequence[Trajectory], fleets: Mapping[int, str] | None = None) -> Batch:
    """What `open_batch` would give; all from one fleet unless said otherwise."""
    fleets = fleets or {t.group_id: FLEET for t in trajectories}
    return Batch(
        trajectories=trajectories, fleets=fleets, group_ids=list(dict.fromkeys(t.group_id for t in trajectories))
    )


def packed(trajectories: Sequence[Trajectory]) -> list[MicroBatch]:
    """Micro-batches that are only looked at."""
    return pack([Sample(trajectory=trajectory) for trajectory in trajectories], 1000)


@torch.no_grad()
def scores(roles: Roles, trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """The actor's log-probabilities of every trained token."""
    return torch.cat([roles.actor.score(batch)[0] for batch in packed(trajectories)])


@torch.no_grad()
def values(roles: Roles, trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """The critic's values before every trained token."""
    assert roles.critic is not None
    return torch.cat([roles.critic.score(batch) for batch in packed(trajectories)])
