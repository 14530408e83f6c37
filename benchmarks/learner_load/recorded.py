"""Real batches: groups of the recordings, as a learner would lease them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import experience_codec
from forebay.config.load import load
from forebay.config.models import RunFile
from forebay.learner.batch import by_group
from forebay.wire.trajectory import Trajectory

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recording, the run file that it came from, and how much of it is trained in a step."""

    recording: str
    run_file: Path
    groups: int
    tokens_per_microbatch: int  #: ours
    sequences_per_microbatch: int  #: TRL's

    def trajectories(self) -> list[Trajectory]:
        """Whole groups, their rewards replaced by random ones: without variance a group teaches nothing, and ours would
        skip it."""
        parcels = experience_codec.load(ROOT / "benchmarks" / "recordings" / f"{self.recording}.parquet")
        groups = by_group([member for parcel in parcels for member in parcel.trajectories])
        random = np.random.default_rng(0)
        chosen = list(groups.values())[: self.groups]
        return [replace(member, reward=float(random.normal())) for group in chosen for member in group]

    def run(self, dtype: str) -> RunFile:
        """The run file with the parts that both sides have: one update a step, one precision, the defaults of GRPO."""
        tree = load([self.run_file], {}).model_dump(exclude_unset=True)
        tree["model"] |= {"path": str(ROOT / tree["model"]["path"])}
        tree["learner"] |= {
            "compute_dtype": dtype,
            "zero_stage": 0 if dtype == "float32" else 1,
            "groups_per_step": self.groups,
            "minibatches": 1,
            "tokens_per_microbatch": self.tokens_per_microbatch,
            "lr": 1e-8,  # the same batch again and again: at the run's own rate the policy leaves it, and is stopped
        }
        return RunFile.model_validate(tree)


CASES = {
    "short": Case(
        recording="smollm2",
        run_file=ROOT / "examples" / "smollm2.toml",
        groups=16,
        tokens_per_microbatch=512,
        sequences_per_microbatch=16,
    ),
    "long": Case(
        recording="smollm2_long",
        run_file=ROOT / "benchmarks" / "recordings" / "smollm2_long.toml",
        groups=4,
        tokens_per_microbatch=512,
        sequences_per_microbatch=4,
    ),
}
