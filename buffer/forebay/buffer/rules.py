"""The numbers of a run file that the buffer's decisions depend on."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.config.models import RunFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What admission, batching and evaluation go by."""

    run: str
    seed: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    steps: int
    publish_every_steps: int
    eval_every_steps: int
    heldout_prompts: int
    keep_checkpoints: int
    drop_stale: bool
    selector: str
    priority_aging: float
    max_times_sampled: int
    max_attempts: int
    groups_of_data: int | None  #: groups that the prompts last for; None: for ever

    @classmethod
    def of(cls, run: RunFile) -> Rules:
        """Read them from a run file."""
        return cls(
            run=run.run.name,
            seed=run.run.seed,
            groups_per_step=run.learner.groups_per_step,
            group_size=run.learner.group_size,
            max_staleness=run.learner.max_staleness,
            steps=run.learner.steps,
            publish_every_steps=run.publish.every_steps,
            eval_every_steps=run.observe.eval_every_steps,
            heldout_prompts=run.task.heldout_prompts,
            keep_checkpoints=run.learner.keep_checkpoints,
            drop_stale=run.learner.stale == "drop",
            selector=run.learner.selector,
            priority_aging=run.learner.priority_aging,
            max_times_sampled=run.learner.max_times_sampled,
            max_attempts=run.learner.max_attempts,
            groups_of_data=run.task.epochs * run.task.train_prompts or None,
        )

    @property
    def groups_wanted(self) -> int:
        """Groups that the whole run trains; fewer when each is sampled several times."""
        return -(-self.groups_per_step * self.steps // self.max_times_sampled)

    def capacity(self, step: int) -> int:
        """Groups that may have been started when the weights of `step` are the newest (AReaL's formula, DESIGN 4).

        With samples per insert, as Reverb calls it, above 1, a step needs that much less of what is new.
        """
        started = self.groups_per_step * (step + self.max_staleness + 1)
        return min(max(self.groups_per_step, -(-started // self.max_times_sampled)), self.groups_wanted)
