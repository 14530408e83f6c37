"""What judges texts, whatever model is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.wire.v1 import reward_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a completion has no score."""

    kind: reward_pb2.ScoreError.Kind.ValueType
    message: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Text:
    """A prompt with one completion, as the model reads it. T = tokens, at least one."""

    ids: NDArray[np.int64]  #: shape [T]
    parts: NDArray[np.int64] | None = None  #: shape [T]; which of a pair a token belongs to, where the model asks

    def __len__(self) -> int:
        return len(self.ids)


class Scorer(Protocol):
    """A reward model. Each method is called by one thread at a time, but the two at once."""

    def encode(self, conversation: reward_pb2.Conversation) -> list[Text | Problem]:
        """One text a completion, in order."""
        ...

    def score(self, batch: Sequence[Text]) -> list[float]:
        """One number a text, in order; not finite where the model says so. May raise."""
        ...
