"""The reference model in another process, maybe on another machine.

Shape suffixes: t trained tokens.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

import grpc
import torch

from forebay.backoff import pause_after
from forebay.buffer.calls import CLIENT_OPTIONS
from forebay.config.models import RunFile
from forebay.errors import UsageError
from forebay.learner.errors import LearnerError
from forebay.learner.packing import MicroBatch
from forebay.learner.reference.wire import from_answer, to_request
from forebay.learner.stop import Stop
from forebay.wire.errors import WireError
from forebay.wire.v1 import reference_pb2, reference_pb2_grpc

log = logging.getLogger(__name__)

#: Seconds that one answer may take before it is asked for again.
TIMEOUT_S = 120.0
#: Seconds without an answer after which a learner that was told to stop does so.
HURRIED_S = 10.0
#: Answers that the same question would get again.
_FINAL = frozenset(
    {
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)


class RemoteReference:
    """Asks a `forebay reference` and waits for it, however long it is away. Blocks; for one thread."""

    def __init__(self, run: RunFile, address: str, stop: Stop, tell: Callable[[str], None]) -> None:
        """`tell` hears of a wait as it begins, in words for `forebay status`, and of its end."""
        self._model, self._address = run.learner.reference.path or run.model.path, address
        self._stop, self._tell, self._dice = stop, tell, random.Random()
        self._channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        self._stub: Any = reference_pb2_grpc.ReferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._away_since: float | None = None

    def ready(self) -> None:
        """Return when it can be asked. Raises UsageError when what answers there is something else."""
        try:
            self._ask(reference_pb2.LogprobsRequest(model=self._model))
        except LearnerError as error:
            if self._stop.asked:
                raise
            raise UsageError(f"learner.reference.address: {error}") from error

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probability [t] of each trained token. Raises LearnerError when there will be none."""
        if not batch.targets:
            return torch.zeros(0, device=batch.tokens_n.device)
        answer = self._ask(to_request(self._model, batch.samples))
        try:
            return torch.from_numpy(from_answer(answer, batch.targets)).to(batch.tokens_n.device)
        except WireError as error:
            raise LearnerError(f"the reference at {self._address} sent nothing usable: {error}") from error

    def rest(self) -> None:
        """It is another process's memory."""

    def _ask(self, request: reference_pb2.LogprobsRequest) -> reference_pb2.LogprobsResponse:
        tries = 0
        while True:
            try:
                answer: reference_pb2.LogprobsResponse = self._stub.Logprobs(request, timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                self._failed(error)
                self._stop.wait(pause_after(tries, self._dice))
                tries += 1
            else:
                self._reached()
                return answer

    def _failed(self, error: Any) -> None:
        """Take note of it. Raises LearnerError when it is no use to ask again, or no time."""
        details = ((error.details() or "").splitlines() or ["no details"])[0][:200]
        why = f"{error.code().name.lower()}: {details}"
        if error.code() in _FINAL:
            raise LearnerError(f"the reference at {self._address} refuses: {why}") from error
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            log.warning("reference at %s: %s; trying again", self._address, why)
        if self._stop.asked and now - self._away_since >= HURRIED_S:
            raise LearnerError(f"told to stop while the reference at {self._address} is away ({why})") from error
        self._tell(f"waiting: reference at {self._address} ({why})")

    def _reached(self) -> None:
        if self._away_since is not None:
            self._away_since = None
            log.info("reference at %s answers", self._address)
            self._tell("training")
