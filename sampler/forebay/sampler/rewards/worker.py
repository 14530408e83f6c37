"""Inside a reward worker: the task, built once, and its judgement. Nothing here imports torch or vLLM."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from forebay.config.models import TaskSection
from forebay.sampler.tasks.load import build_task
from forebay.sampler.tasks.task import Question, Score, Task

_task: Task | None = None


def begin(section: TaskSection, seed: int) -> None:
    """Runs first in each worker process."""
    from forebay.sampler.plugin import die_with_parent

    global _task
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the sampler's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(os.getppid())
    _task = build_task(section, seed)


def score(question: Question, answers: Sequence[str]) -> list[Score]:
    """One score an answer, in order. Raises whatever the task's `score` raises."""
    assert _task is not None, "begin() runs first"
    return [_task.score(question, answer) for answer in answers]
