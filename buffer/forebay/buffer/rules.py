"""The numbers of a run file that the buffer's decisions depend on."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.config.models import RunFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What admission, batching and evaluation go by."""

    run: str
    groups_per_step: int
    group_size: int
    max_staleness: int
    steps: int
    publish_every_steps: int
    eval_every_steps: int
    heldout_prompts: int
    keep_checkpoints: int

    @classmethod
    def of(cls, run: RunFile) -> Rules:
        """Read them from a run file."""
        return cls(
            run=run.run.name,
            groups_per_step=run.learner.groups_per_step,
            group_size=run.learner.group_size,
            max_staleness=run.learner.max_staleness,
            steps=run.learner.steps,
            publish_every_steps=run.publish.every_steps,
            eval_every_steps=run.observe.eval_every_steps,
            heldout_prompts=run.task.heldout_prompts,
            keep_checkpoints=run.learner.keep_checkpoints,
        )

    @property
    def groups_wanted(self) -> int:
        """Groups that the whole run trains."""
        return self.groups_per_step * self.steps

    def capacity(self, step: int) -> int:
        """Groups that may have been started when the weights of `step` are the newest (AReaL's formula, DESIGN 4)."""
        return min(self.groups_per_step * (step + self.max_staleness + 1), self.groups_wanted)
