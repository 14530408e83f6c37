"""A task for tests: name the letters of a word. Some answers are traps for whoever scores them."""

from __future__ import annotations

import os
import sys
import time

from forebay.config.models import TaskSection
from forebay.sampler.tasks import Question, Score

FOREVER_S = 3600.0


class Letters:
    """Questions `ab0=`, `ab1=`, …; the reward is the share of digits in the answer."""

    def __init__(self, section: TaskSection, seed: int) -> None:
        self.train = [Question(text=f"ab{n}=", metadata={"n": n}) for n in range(section.options.get("train", 30))]
        first = section.options.get("heldout_from", 1000)
        self.heldout = [Question(text=f"ab{n}=") for n in range(first, first + 10)]
        self._hang_once = section.options.get("hang_once")

    def score(self, question: Question, answer: str) -> Score:
        """Hang, crash, raise or lie where the answer says so."""
        if self._hang_once and _first_time(self._hang_once):
            time.sleep(FOREVER_S)
        if answer == "hang":
            time.sleep(FOREVER_S)
        if answer == "crash":
            os._exit(3)
        if answer == "raise":
            raise ZeroDivisionError("no letters")
        if answer == "nan":
            return Score(reward=float("nan"))
        if answer == "heavy modules":
            return Score(reward=float(any(name in sys.modules for name in ("torch", "vllm", "transformers"))))
        digits = sum(map(str.isdigit, answer)) / max(1, len(answer))
        return Score(reward=digits, parts={"digits": digits})


def _first_time(flag: str) -> bool:
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def task(section: TaskSection, seed: int) -> Letters:
    """The factory that [task] name points at."""
    return Letters(section, seed)
