"""The Experience service over the reservoir."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from forebay.buffer.append_stream import AppendStream
from forebay.buffer.calls import answering, streaming, wait_of
from forebay.buffer.conservation import ledger_response
from forebay.buffer.frame_reader import read_ahead
from forebay.buffer.intake import Intake
from forebay.buffer.ledger import Batch
from forebay.buffer.outlet import Outlet
from forebay.buffer.reservoir import Reservoir
from forebay.wire.v1 import experience_pb2, experience_pb2_grpc


class ExperienceService(experience_pb2_grpc.ExperienceServicer):
    """Permits, frames, batches, commits."""

    def __init__(self, reservoir: Reservoir) -> None:
        self._reservoir = reservoir
        self._intake, self._outlet = Intake(reservoir), Outlet(reservoir)

    @answering
    async def Admit(self, request: experience_pb2.AdmitRequest, context: Any) -> experience_pb2.AdmitResponse:
        """Wait for permits, and say for what when none came."""
        answer = await self._reservoir.permits_changed.until(
            lambda: self._intake.admit(request), wait_of(request.wait_s)
        )
        await self._reservoir.durable()
        return answer or experience_pb2.AdmitResponse(waiting_for=self._intake.why_none(request))

    @streaming
    async def Append(
        self, requests: AsyncIterator[experience_pb2.AppendRequest], context: Any
    ) -> AsyncIterator[experience_pb2.AppendResponse]:
        """Take frames as they come; answer, in order, once they are as safe as the stream asked for."""
        async for answer in AppendStream(self._reservoir, self._intake).answers(requests):
            yield answer

    @answering
    async def Refund(self, request: experience_pb2.RefundRequest, context: Any) -> experience_pb2.RefundResponse:
        """Take permits back."""
        self._intake.refund(request)
        await self._reservoir.durable()
        return experience_pb2.RefundResponse()

    @streaming
    async def Lease(
        self, request: experience_pb2.LeaseRequest, context: Any
    ) -> AsyncIterator[experience_pb2.LeaseResponse]:
        """Wait for the batch; then its composition and its frames."""
        batch = await self._reservoir.groups_changed.until(
            lambda: self._outlet.lease(request), wait_of(request.wait_s), give_up=lambda: self._outlet.ended
        )
        await self._reservoir.durable()
        if batch is None:
            yield self._outlet.no_batch()
            return
        async for part in self._parts(request.step, batch):
            yield part

    @answering
    async def Reject(self, request: experience_pb2.RejectRequest, context: Any) -> experience_pb2.RejectResponse:
        """Put groups aside that cannot be trained."""
        self._outlet.reject(request)
        await self._reservoir.durable()
        return experience_pb2.RejectResponse()

    @answering
    async def Commit(self, request: experience_pb2.CommitRequest, context: Any) -> experience_pb2.CommitResponse:
        """The step is done."""
        self._outlet.commit(request)
        await self._reservoir.durable()
        return experience_pb2.CommitResponse()

    @answering
    async def Rewind(self, request: experience_pb2.RewindRequest, context: Any) -> experience_pb2.RewindResponse:
        """Back to a checkpoint."""
        replayed = self._outlet.rewind(request)
        await self._reservoir.durable()
        return experience_pb2.RewindResponse(replayed_batches=replayed)

    @answering
    async def Ledger(self, request: experience_pb2.LedgerRequest, context: Any) -> experience_pb2.LedgerResponse:
        """The conservation law."""
        return ledger_response(self._reservoir.state)

    async def _parts(self, step: int, batch: Batch) -> AsyncIterator[experience_pb2.LeaseResponse]:
        state = self._reservoir.state
        # In order of arrival: of a group that was produced twice, the reader then meets the accepted copy first.
        lsns = sorted({state.groups[group_id].lsn for group_id in batch.group_ids})
        positions = [state.frames[lsn].position for lsn in lsns]
        yield experience_pb2.LeaseResponse(
            batch=experience_pb2.Batch(
                step=step, attempt=batch.attempt, group_ids=batch.group_ids, frames=len(positions)
            )
        )
        async for part in read_ahead(self._reservoir.journal, positions):
            yield part
