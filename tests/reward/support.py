"""A reward model that needs no torch, and run files with reward models."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.models import RunFile
from forebay.reward.scorer import Problem, Text
from forebay.wire.v1 import reward_pb2

DEADLINE_S = 30.0
MAX_LETTERS = 1000


class LetterScorer:
    """A letter is a token, and the score is how many `a` a text has. Some texts are traps.

    `!` makes the model raise, once; `?` makes the score NaN; while `gate` is closed nothing is judged.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.judging = threading.Event()  #: a batch is in the model's hands, or was
        self.batches: list[list[str]] = []
        self.seen: list[reward_pb2.Conversation] = []

    def encode(self, conversation: reward_pb2.Conversation) -> list[Text | Problem]:
        self.seen.append(conversation)
        asked = conversation.system + conversation.prompt
        return [self._encode(asked + completion) for completion in conversation.completions]

    def score(self, batch: Sequence[Text]) -> list[float]:
        self.judging.set()
        assert self.gate.wait(DEADLINE_S)
        texts = [bytes(text.ids.astype(np.uint8)).decode() for text in batch]
        first = not any("!" in text for earlier in self.batches for text in earlier)
        self.batches.append(texts)
        if first and any("!" in text for text in texts):
            raise ZeroDivisionError("out of letters\nand of lines")
        return [math.nan if "?" in text else float(text.count("a")) for text in texts]

    @staticmethod
    def _encode(text: str) -> Text | Problem:
        if len(text) > MAX_LETTERS:
            return Problem(kind=reward_pb2.ScoreError.TOO_LONG, message=f"{len(text)} letters")
        return Text(ids=np.frombuffer(text.encode(), np.uint8).astype(np.int64))


def request(*completions: str, prompt: str = "", model: str = "letters") -> reward_pb2.ScoreRequest:
    """One conversation."""
    asked = reward_pb2.Conversation(prompt=prompt, completions=completions)
    return reward_pb2.ScoreRequest(model=model, conversations=[asked])


def run_file(folder: Path, addresses: dict[str, str], **reward: Any) -> RunFile:
    """A run of the letters task with a reward model at each address. `model__key` sets a key of each model."""
    own = {key.removeprefix("model__"): reward.pop(key) for key in list(reward) if key.startswith("model__")}
    models = {name: {"path": "x", "address": address, **own} for name, address in addresses.items()}
    return RunFile.model_validate(
        {
            "run": {"name": "test", "folder": folder, "seed": 7},
            "model": {"path": "x"},
            "task": {"name": "tests.sampler.letters:task", "chat": False, "train_prompts": 20, "heldout_prompts": 0},
            "reward": {"patience_s": 5.0, **reward, "models": models},
            "publish": {"dtype": "float32"},
            "learner": {"group_size": 4, "groups_per_step": 2},
            "sampler": {"id": "s0", "concurrent_groups": 2, "frame_linger_s": 0.01},
        }
    )
