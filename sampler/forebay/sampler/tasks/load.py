"""From the run file's [task] to a task that is safe to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.config.entry_point import entry_point
from forebay.config.models import TaskSection
from forebay.errors import UsageError
from forebay.sampler.tasks.gym import GymTask
from forebay.sampler.tasks.jsonl import JsonlTask
from forebay.sampler.tasks.task import Question, Score, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTask:
    """A task whose parts were checked: enough prompts, each text once, none on both sides."""

    train: Sequence[Question]
    heldout: Sequence[Question]
    task: Task

    def score(self, question: Question, answer: str) -> Score:
        """The task's own judgement."""
        return self.task.score(question, answer)


def load_task(section: TaskSection, seed: int) -> LoadedTask:
    """Build the task and its questions, the same for the same seed.

    Raises UsageError when there is no such task, or it has too few distinct prompts, or the same on both sides.
    """
    task = build_task(section, seed)
    train = _first(task.train, section.train_prompts, "train", section.name)
    heldout = _first(task.heldout, section.heldout_prompts, "heldout", section.name)
    both = {question.text for question in train} & {question.text for question in heldout}
    if both:
        raise UsageError(
            f"task {section.name}: {len(both)} prompts are trained on and held out as well, for example {min(both)!r}"
        )
    return LoadedTask(train=train, heldout=heldout, task=task)


def build_task(section: TaskSection, seed: int) -> Task:
    """The task without its questions: all that a reward worker needs."""
    kind, _, rest = section.name.partition(":")
    if not rest:
        raise UsageError(
            f'task.name is "{section.name}": expected reasoning-gym:TASK, jsonl:FILE or package.module:factory'
        )
    if kind == "reasoning-gym":
        return GymTask(rest, section, seed)
    if kind == "jsonl":
        return JsonlTask(rest, section, seed)
    return _from_factory(section, seed)


def _from_factory(section: TaskSection, seed: int) -> Task:
    factory = entry_point("task.name", section.name)
    task = factory(section, seed)
    if not isinstance(task, Task):
        raise UsageError(f'task.name is "{section.name}": what it returns lacks train, heldout or score')
    return task


def _first(questions: Sequence[Question], wanted: int, side: str, name: str) -> list[Question]:
    distinct = list({question.text: question for question in questions}.values())
    if len(distinct) < wanted:
        raise UsageError(
            f"task {name} has {len(distinct)} distinct {side} prompts, task.{side}_prompts is {wanted}: lower it"
        )
    return distinct[:wanted]
