"""Checkpoints written behind training's back: what training waits for is a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from forebay.errors import ForebayError
from forebay.learner.errors import LearnerError


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread of its own. The methods are for one training thread."""

    def __init__(self, saved_step: int) -> None:
        self._saved_step = saved_step
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._room: dict[str, torch.Tensor] = {}

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint that is complete and durable."""
        return self._saved_step

    def copied(self, state: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """`state` in host memory that is taken once and kept: to be handed 1.6 GB of new pages took longer than to fill
        them. Waits for the checkpoint before, which may be written from there. Raises LearnerError."""
        self.wait()
        return [(name, self._copy(name, tensor.detach())) for name, tensor in state]

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        room = self._room.get(name)
        if room is None:
            room = self._room[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return room.copy_(tensor)

    def start(self, step: int, write: Callable[[], object]) -> None:
        """Have `write` called, which makes the checkpoint of `step`; after the one before is done. Raises LearnerError
        when that one failed."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(step, write), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until nothing is being written, or `timeout_s` has passed. Raises LearnerError when it failed."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._error is not None:
            error, self._error = self._error, None
            raise LearnerError(f"the checkpoint could not be written: {error}") from error

    def _run(self, step: int, write: Callable[[], object]) -> None:
        try:
            write()
        except (OSError, ForebayError) as error:
            self._error = error
        else:
            self._saved_step = step
