"""The gRPC server of a reference model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio

from forebay.buffer.calls import SERVER_OPTIONS
from forebay.buffer.ports import split
from forebay.health import HealthService
from forebay.learner.packing import pack
from forebay.learner.reference.model import ReferenceModel
from forebay.learner.reference.wire import from_request, to_answer
from forebay.learner.sample import Floats32, Sample, by_sample
from forebay.wire.errors import WireError
from forebay.wire.v1 import reference_pb2, reference_pb2_grpc

SERVICE = "forebay.wire.v1.Reference"
#: Calls at once at most: with the size of one, what callers can make this process hold.
MAX_CALLS = 16


class ReferenceServer(reference_pb2_grpc.ReferenceServicer):
    """Answers from the start, and with log-probabilities from `open` on. One forward pass at a time."""

    def __init__(self, name: str, listen: str) -> None:
        """`name`: the model's path, as callers know it."""
        self._name = name
        self._answer: Callable[[reference_pb2.LogprobsRequest], reference_pb2.LogprobsResponse] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reference-model")
        self._health = HealthService(["", SERVICE])
        self._server: Any = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((self._health.handler,))
        reference_pb2_grpc.add_ReferenceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        host, _ = split(listen)
        port: int = self._server.add_insecure_port(listen)
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def start(self) -> None:
        """Begin to answer; calls are told to come again until `open`."""
        await self._server.start()

    async def open(self, model: ReferenceModel, *, tokens_per_microbatch: int) -> None:
        """Take calls."""

        def answer(request: reference_pb2.LogprobsRequest) -> reference_pb2.LogprobsResponse:
            samples = from_request(request, vocabulary=model.vocabulary, longest=model.longest)
            return to_answer(scored(model, samples, tokens_per_microbatch))

        self._answer = answer
        await self._health.say(serving=True)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, give running ones `grace_s`, hang up."""
        await self._health.say(serving=False, closing=True)
        await self._server.stop(grace_s)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def Logprobs(self, request: reference_pb2.LogprobsRequest, context: Any) -> reference_pb2.LogprobsResponse:
        """Log-probabilities, or why not."""
        if request.model != self._name:
            told = f"model {request.model[:100]!r} is not served here, but {self._name!r}"
            await context.abort(grpc.StatusCode.NOT_FOUND, told)
        if self._answer is None or not self._health.serving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is being loaded, or the service stops")
        assert self._answer is not None
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, request)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise


def scored(model: ReferenceModel, samples: Sequence[Sample], tokens_per_microbatch: int) -> list[Floats32]:
    """Log-probabilities of each sample that has trained tokens, in order. Blocks."""
    found: dict[int, Floats32] = {}
    for batch in pack(samples, tokens_per_microbatch):
        logprob_t = model.logprobs(batch.to(model.device)).float().cpu().numpy()
        found |= {id(sample): part for sample, part in by_sample(batch.samples, logprob_t)}
    return [found[id(sample)] for sample in samples if sample.targets]
