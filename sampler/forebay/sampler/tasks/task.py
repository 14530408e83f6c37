"""What a task is: questions to train on, others held out, and a judgement of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt of a task."""

    text: str
    reference: Any = None  #: what `score` needs to judge an answer: plain data, it travels to the reward workers
    metadata: Mapping[str, Any] = field(default_factory=dict)  #: JSON; kept with every trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How good an answer is. A reward that cannot be told is an exception, never 0."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """What `package.module:factory` returns, called as `factory(section: TaskSection, seed: int)`.

    Built once in the sampler for its questions and once in each reward worker for `score`: make the questions lazily if
    they cost much, and import nothing heavy on the way to `score`.
    """

    @property
    def train(self) -> Sequence[Question]:
        """Questions to learn from, each text once. The order matters: a group id decides an index."""
        ...

    @property
    def heldout(self) -> Sequence[Question]:
        """Questions that are never trained on."""
        ...

    def score(self, question: Question, answer: str) -> Score:
        """Judge an answer, already extracted from the reply. May raise: then the reply counts as not scored."""
        ...
