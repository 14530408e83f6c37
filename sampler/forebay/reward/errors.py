"""What can go wrong with scores of reward models."""

from __future__ import annotations

import grpc

from forebay.errors import ForebayError


class RewardModelError(ForebayError):
    """Root of these errors."""


class ScoreFailed(RewardModelError, RuntimeError):
    """A reply has no score: the model cannot be reached, or cannot judge it. Never to be taken for 0."""


class CallRefused(RewardModelError):
    """A call that the service does not take; `code` says why, in gRPC's words."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
