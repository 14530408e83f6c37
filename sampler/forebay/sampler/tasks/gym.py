"""Tasks of the reasoning-gym library, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import Any

from forebay.config.models import TaskSection
from forebay.errors import UsageError
from forebay.sampler.tasks.task import Question, Score

#: Draws without a new question, beyond this and beyond five times what was found, mean that there are no more.
_PATIENCE = 1000


class GymTask:
    """A procedural data set: the first distinct questions are held out, the next ones are trained on."""

    def __init__(self, task: str, section: TaskSection, seed: int) -> None:
        """Raises UsageError for a task or an option that reasoning-gym does not have."""
        self._task, self._section, self._seed = task, section, seed
        self._draws = 20 * (section.train_prompts + section.heldout_prompts) + 10 * _PATIENCE
        self._dataset = _dataset(task, section, seed, self._draws)

    @property
    def heldout(self) -> list[Question]:
        """Independent of how many are trained on."""
        return self._questions[: self._section.heldout_prompts]

    @property
    def train(self) -> list[Question]:
        """Distinct from the held-out ones and from each other."""
        return self._questions[self._section.heldout_prompts :]

    def score(self, question: Question, answer: str) -> Score:
        """reasoning-gym's own score, in [0, 1]."""
        reward = float(self._dataset.score_answer(answer, question.reference))
        return Score(reward=reward, parts={"accuracy": reward})

    @cached_property
    def _questions(self) -> list[Question]:
        wanted = self._section.train_prompts + self._section.heldout_prompts
        questions = list(islice(self._distinct(), wanted))
        if len(questions) < wanted:
            raise UsageError(
                f"task reasoning-gym:{self._task} has only {len(questions)} distinct prompts with these options, but "
                f"task.train_prompts + task.heldout_prompts is {wanted}: lower them, or widen task.options"
            )
        return questions

    def _distinct(self) -> Iterator[Question]:
        seen: set[str] = set()
        last_new = 0
        for draw in range(self._draws):
            entry = self._dataset[draw]
            if entry["question"] not in seen:
                seen.add(entry["question"])
                last_new = draw
                yield Question(text=entry["question"], reference=entry, metadata={"index": draw})
            elif draw - last_new > max(_PATIENCE, 5 * len(seen)):
                return


def _dataset(task: str, section: TaskSection, seed: int, size: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f'did you mean "reasoning-gym:{close[0]}"?' if close else "see reasoning_gym.factory.DATASETS"
        raise UsageError(f'task.name is "reasoning-gym:{task}": reasoning-gym has no such task; {hint}')
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **section.options)
    except (TypeError, ValueError, AssertionError) as error:
        known = ", ".join(sorted(DATASETS[task][1].__dataclass_fields__.keys() - {"seed", "size"}))
        raise UsageError(f"task.options do not fit reasoning-gym:{task}: {error}; its options are {known}") from error
