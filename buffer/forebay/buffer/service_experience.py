"""The Experience service over the buffer's runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from forebay.buffer.answers import Part
from forebay.buffer.append_stream import AppendStream
from forebay.buffer.calls import answering, streaming, wait_of
from forebay.buffer.conservation import ledger_response
from forebay.buffer.frame_reader import read_ahead
from forebay.buffer.tenants import Tenants
from forebay.wire.v1 import experience_pb2, experience_pb2_grpc

_NAME = experience_pb2.DESCRIPTOR.services_by_name["Experience"].full_name


def register(service: ExperienceService, server: Any) -> None:
    """Have `server` answer for the service. Its leases may be bytes, which the generated code does not know."""
    lease = grpc.unary_stream_rpc_method_handler(
        service.Lease,
        request_deserializer=experience_pb2.LeaseRequest.FromString,
        response_serializer=_encoded,
    )
    handler = grpc.method_handlers_generic_handler(_NAME, {"Lease": lease})
    server.add_generic_rpc_handlers((handler,))  # of two handlers of a method the first one counts
    experience_pb2_grpc.add_ExperienceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    server.add_registered_method_handlers(_NAME, {"Lease": lease})


def _encoded(part: experience_pb2.LeaseResponse | bytes) -> bytes:
    return part if isinstance(part, bytes) else part.SerializeToString()


class ExperienceService(experience_pb2_grpc.ExperienceServicer):
    """Permits, frames, batches, commits."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    @answering
    async def Admit(self, request: experience_pb2.AdmitRequest, context: Any) -> experience_pb2.AdmitResponse:
        """Wait for permits, and say for what when none came."""
        tenant = self._tenants.of(request)
        answer = await tenant.reservoir.permits_changed.until(
            lambda: tenant.intake.admit(request), wait_of(request.wait_s)
        )
        await tenant.reservoir.durable()
        return answer or experience_pb2.AdmitResponse(waiting_for=tenant.intake.why_none(request))

    @streaming
    async def Append(
        self, requests: AsyncIterator[experience_pb2.AppendRequest], context: Any
    ) -> AsyncIterator[experience_pb2.AppendResponse]:
        """Take frames as they come; answer, in order, once they are as safe as the stream asked for."""
        hello = await anext(aiter(requests), None)
        if hello is not None:
            tenant = self._tenants.of(hello)
            async for answer in AppendStream(tenant.reservoir, tenant.intake, hello).answers(requests):
                yield answer

    @answering
    async def Refund(self, request: experience_pb2.RefundRequest, context: Any) -> experience_pb2.RefundResponse:
        """Take permits back."""
        tenant = self._tenants.of(request)
        tenant.intake.refund(request)
        await tenant.reservoir.durable()
        return experience_pb2.RefundResponse()

    @streaming
    async def Lease(
        self, request: experience_pb2.LeaseRequest, context: Any
    ) -> AsyncIterator[experience_pb2.LeaseResponse | bytes]:
        """Wait for the batch; then its composition and its frames, these encoded already."""
        tenant = self._tenants.of(request)
        reservoir, outlet = tenant.reservoir, tenant.outlet
        if request.HasField("commit"):
            outlet.commit(request.commit)
        batch = await reservoir.groups_changed.until(
            lambda: outlet.lease(request), wait_of(request.wait_s), give_up=lambda: outlet.ended
        )
        await reservoir.durable()
        if batch is None:
            yield outlet.no_batch()
            return
        positions = outlet.positions(batch, Part(part=request.part, parts=max(1, request.parts)))
        yield experience_pb2.LeaseResponse(
            batch=experience_pb2.Batch(
                step=request.step, attempt=batch.attempt, group_ids=batch.group_ids, frames=len(positions)
            )
        )
        async for part in read_ahead(reservoir.journal, positions):
            yield part

    @answering
    async def Reject(self, request: experience_pb2.RejectRequest, context: Any) -> experience_pb2.RejectResponse:
        """Put groups aside that cannot be trained."""
        tenant = self._tenants.of(request)
        tenant.outlet.reject(request)
        await tenant.reservoir.durable()
        return experience_pb2.RejectResponse()

    @answering
    async def Commit(self, request: experience_pb2.CommitRequest, context: Any) -> experience_pb2.CommitResponse:
        """The step is done."""
        tenant = self._tenants.of(request)
        tenant.outlet.commit(request)
        await tenant.reservoir.durable()
        return experience_pb2.CommitResponse()

    @answering
    async def Rewind(self, request: experience_pb2.RewindRequest, context: Any) -> experience_pb2.RewindResponse:
        """Back to a checkpoint."""
        tenant = self._tenants.of(request)
        replayed = tenant.outlet.rewind(request)
        await tenant.reservoir.durable()
        return experience_pb2.RewindResponse(replayed_batches=replayed)

    @answering
    async def Ledger(self, request: experience_pb2.LedgerRequest, context: Any) -> experience_pb2.LedgerResponse:
        """The conservation law."""
        return ledger_response(self._tenants.of(request).reservoir.state)
