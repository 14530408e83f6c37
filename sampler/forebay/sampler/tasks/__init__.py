"""Tasks: questions, held-out questions, and how answers are judged."""

from __future__ import annotations

from forebay.sampler.tasks.load import LoadedTask, load_task
from forebay.sampler.tasks.task import Question, Score, Task

__all__ = ["LoadedTask", "Question", "Score", "Task", "load_task"]
