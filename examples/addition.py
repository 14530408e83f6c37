"""Two-digit addition: `37+58=` is answered by `95`. 8,100 distinct prompts, 400 of them kept apart for good."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.config.models import TaskSection
from forebay.sampler.tasks.task import Question, Score

#: The split is part of the task, not of a run: the warm-up of `examples.tiny_model` must not see the held-out part.
SPLIT_SEED = 20
HELDOUT_PAIRS = 400

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """The task, for `[task] name = "examples.addition:task"`."""

    train: Sequence[Question]
    heldout: Sequence[Question]

    def score(self, question: Question, answer: str) -> Score:
        """1 for exactly the sum, else 0."""
        exact = float(answer == question.reference)
        return Score(reward=exact, parts={"exact": exact})


def task(section: TaskSection, seed: int) -> Addition:
    """The factory that the run file names. Questions are the same for every seed; their order and the model differ."""
    train, heldout = pairs()
    return Addition(train=[_question(pair) for pair in train], heldout=[_question(pair) for pair in heldout])


def pairs() -> tuple[list[Pair], list[Pair]]:
    """All pairs of two-digit numbers as (7,700 to train on, 400 held out), in a fixed shuffled order."""
    every = [(left, right) for left in range(10, 100) for right in range(10, 100)]
    random.Random(SPLIT_SEED).shuffle(every)
    return every[HELDOUT_PAIRS:], every[:HELDOUT_PAIRS]


def prompt(pair: Pair) -> str:
    """What is asked, `37+58=`."""
    return f"{pair[0]}+{pair[1]}="


def answer(pair: Pair) -> str:
    """The only right reply, `95`."""
    return str(pair[0] + pair[1])


def _question(pair: Pair) -> Question:
    return Question(text=prompt(pair), reference=answer(pair))
