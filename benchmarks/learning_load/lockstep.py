"""A run in one process in which every batch is exactly so many steps old."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning_load.cells import Cell
from benchmarks.learning_load.generator import LockstepGenerator
from examples import addition
from forebay.config.load import load
from forebay.config.models import RunFile
from forebay.learner.batch import Batch
from forebay.learner.errors import LearnerError
from forebay.learner.pretrained import load_model
from forebay.learner.roles import load_roles
from forebay.learner.snapshot import published_tensors
from forebay.learner.trainer import Trainer
from forebay.obs.phases import PhaseClock
from forebay.wire.version import Version

ROOT = Path(__file__).parents[2]
RUN_FILE = ROOT / "examples" / "quickstart.toml"
LAST_REWARDS = 10  #: steps
FLEET = "lockstep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to. Scores and rewards: 0 to 1; `stopped`: why it ended early, or empty."""

    cell: str
    seed: int
    score: float  #: of the held-out questions, at the end
    last_reward: float  #: mean over the last steps
    mean_reward: float  #: over all steps: how fast it learned
    trajectories: int
    kl: float  #: of the last step, to the weights that generated
    stopped: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Lockstep:
    """The learner's trainer on the quickstart's model and task; only vLLM and the buffer are left out."""

    def __init__(self, cell: Cell, seed: int, steps: int) -> None:
        self._cell, self._seed, self._steps = cell, seed, steps
        self._run = run_of(cell, seed, steps)
        torch.manual_seed(seed)
        self._model = load_model(self._run.model.path)
        self._trainer = Trainer(load_roles(self._run, self._model), self._run, PhaseClock())
        self._task = addition.task(self._run.task, seed)
        self._generator = LockstepGenerator(self._run.model.path, self._task, self._run.sampler.max_new_tokens, seed)
        self._weights: deque[Mapping[str, torch.Tensor]] = deque([self._copy()], maxlen=cell.age + 1)

    def run(self) -> Outcome:
        """Train all steps, or until the learner refuses to go on."""
        rewards, kl, stopped = list[float](), 0.0, ""
        for step in range(1, self._steps + 1):
            self._generator.take(self._weights[0])
            batch = self._generator.groups(
                self._questions(step),
                self._run.learner.group_size,
                first_id=step * self._run.learner.groups_per_step,
                version=Version(1, max(0, step - 1 - self._cell.age)),
            )
            fleets = dict.fromkeys((one.group_id for one in batch), FLEET)
            rewards.append(sum(one.reward for one in batch) / len(batch))
            try:
                kl = self._trainer.train(step, Batch(trajectories=batch, fleets=fleets, group_ids=list(fleets)))["kl"]
            except LearnerError as error:
                stopped = f"step {step}: {error}"
                break
            self._weights.append(self._copy())
        self._generator.take(self._weights[-1])
        return Outcome(
            cell=self._cell.name,
            seed=self._seed,
            score=round(self._generator.score(self._task.heldout), 4),
            last_reward=round(sum(rewards[-LAST_REWARDS:]) / len(rewards[-LAST_REWARDS:]), 4),
            mean_reward=round(sum(rewards) / len(rewards), 4),
            trajectories=len(rewards) * self._run.learner.groups_per_step * self._run.learner.group_size,
            kl=round(kl, 5),
            stopped=stopped,
        )

    def _questions(self, step: int) -> list[Any]:
        return random.Random(f"{self._seed}-{step}").sample(list(self._task.train), self._run.learner.groups_per_step)

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in published_tensors(self._model).items()}


def run_of(cell: Cell, seed: int, steps: int) -> RunFile:
    """The quickstart's run file with the cell's settings."""
    tree = load([RUN_FILE], {}).model_dump(exclude_unset=True)
    tree["learner"] |= {"max_staleness": 0, **cell.learner, "steps": steps}
    tree["run"] |= {"seed": seed}
    return RunFile.model_validate(tree)
