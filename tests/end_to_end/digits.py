"""A model without any training and a task it can learn in a few steps: reply with digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.tiny_model import character_tokenizer, new_model
from forebay.config.models import TaskSection
from forebay.sampler.tasks.task import Question, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """The reward is the share of digits in the reply."""

    train: Sequence[Question]
    heldout: Sequence[Question]

    def score(self, question: Question, answer: str) -> Score:
        share = sum(letter.isdigit() for letter in answer) / max(1, len(answer))
        return Score(reward=share, parts={"digits": share})


def task(section: TaskSection, seed: int) -> Digits:
    """The factory that the run file names."""
    questions = [Question(text=f"{number:03d}=", reference="") for number in range(400)]
    return Digits(train=questions[:300], heldout=questions[300:])


def make(folder: Path, seed: int) -> None:
    """Random weights."""
    tokenizer = character_tokenizer()
    new_model(len(tokenizer), seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
