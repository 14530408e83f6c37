"""Tasks from a JSONL file of prompts and answers, scored by math-verify."""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from forebay.config.models import TaskSection
from forebay.errors import UsageError
from forebay.sampler.tasks.task import Question, Score

_OPTIONS = {"prompt_key": "prompt", "answer_key": "answer"}


class JsonlTask:
    """The file's distinct prompts in a seeded order: the first are held out, the next are trained on."""

    def __init__(self, file: str, section: TaskSection, seed: int) -> None:
        """Raises UsageError for an unknown option. The file is read when its questions are asked for."""
        self._file, self._section, self._seed = Path(file).expanduser(), section, seed
        for option in section.options.keys() - _OPTIONS.keys():
            close = difflib.get_close_matches(option, _OPTIONS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"expected {' or '.join(_OPTIONS)}"
            raise UsageError(f"task.options.{option} is not an option of a jsonl task: {hint}")
        chosen = {**_OPTIONS, **section.options}
        self._prompt_key, self._answer_key = str(chosen["prompt_key"]), str(chosen["answer_key"])

    @property
    def heldout(self) -> list[Question]:
        """Independent of how many are trained on."""
        return self._questions[: self._section.heldout_prompts]

    @property
    def train(self) -> list[Question]:
        """Distinct from the held-out ones and from each other."""
        return self._questions[self._section.heldout_prompts :]

    def score(self, question: Question, answer: str) -> Score:
        """1 when the answer equals the file's, as text or as mathematics; else 0."""
        reward = float(answer == question.reference or _equal_mathematically(question.reference, answer))
        return Score(reward=reward, parts={"accuracy": reward})

    @cached_property
    def _questions(self) -> list[Question]:
        questions = list({question.text: question for question in self._read()}.values())
        wanted = self._section.train_prompts + self._section.heldout_prompts
        if len(questions) < wanted:
            raise UsageError(
                f"{self._file} has {len(questions)} distinct prompts, but task.train_prompts + task.heldout_prompts is "
                f"{wanted}: lower them"
            )
        random.Random(self._seed).shuffle(questions)
        return questions[:wanted]

    def _read(self) -> Iterator[Question]:
        try:
            with self._file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield self._question(number, line)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f'task.name names the file "{self._file}", which cannot be read: {error}') from error

    def _question(self, number: int, line: str) -> Question:
        try:
            row: Any = json.loads(line)
            prompt, answer = row[self._prompt_key], row[self._answer_key]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f'{self._file}, line {number}: expected a JSON object with "{self._prompt_key}" and '
                f'"{self._answer_key}" '
                f"({type(error).__name__}: {error})"
            ) from error
        return Question(text=str(prompt), reference=str(answer), metadata={"line": number})


def _equal_mathematically(reference: str, answer: str) -> bool:
    """May hang on hostile input, its own time limits off: the reward pool's are the ones that hold."""
    import math_verify

    library: Any = math_verify  # its annotations do not allow the documented None
    gold, given = (library.parse(text, parsing_timeout=None) for text in (reference, answer))
    return bool(gold) and bool(given) and bool(library.verify(gold, given, timeout_seconds=None))
