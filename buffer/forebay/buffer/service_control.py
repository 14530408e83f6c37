"""The Control service over the buffer's runs."""

from __future__ import annotations

from typing import Any

from forebay.buffer.calls import answering
from forebay.buffer.errors import MemberFenced
from forebay.buffer.reservoir import Reservoir
from forebay.buffer.status import evals_of, status_of
from forebay.buffer.tenants import Tenants
from forebay.config.identity import run_name
from forebay.wire.v1 import control_pb2, control_pb2_grpc, journal_pb2


class ControlService(control_pb2_grpc.ControlServicer):
    """Who takes part, what they do, what they wait for."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    @answering
    async def Join(self, request: control_pb2.JoinRequest, context: Any) -> control_pb2.JoinResponse:
        """Grant an incarnation."""
        tenant = self._tenants.joined_by(run_name(request.run_json))
        member, reservoir = tenant.roster.join(request), tenant.reservoir
        await reservoir.durable()
        return control_pb2.JoinResponse(
            member=member,
            run=reservoir.rules.run,
            heartbeat_s=reservoir.members.timeout_s / 5,
            committed_step=reservoir.state.committed,
            checkpoint_step=reservoir.state.checkpoint,
        )

    @answering
    async def Heartbeat(self, request: control_pb2.HeartbeatRequest, context: Any) -> control_pb2.HeartbeatResponse:
        """Note what a member does; tell it what is wanted of it."""
        tenant = self._tenants.of(request)
        answer = control_pb2.HeartbeatResponse(
            drain=tenant.reservoir.draining,
            paused=bool(tenant.reservoir.state.paused),
            finished=tenant.reservoir.finished,
        )
        try:
            tenant.roster.heartbeat(request)
        except MemberFenced:
            answer.fenced = True
        return answer

    @answering
    async def Leave(self, request: control_pb2.LeaveRequest, context: Any) -> control_pb2.LeaveResponse:
        """A member goes; its permits go to others."""
        tenant = self._tenants.of(request)
        tenant.roster.leave(request)
        await tenant.reservoir.durable()
        return control_pb2.LeaveResponse()

    @answering
    async def Status(self, request: control_pb2.StatusRequest, context: Any) -> control_pb2.StatusResponse:
        """One coherent look."""
        return status_of(self._tenants.of(request).reservoir)

    @answering
    async def Pause(self, request: control_pb2.PauseRequest, context: Any) -> control_pb2.PauseResponse:
        """No permits and no batches until resumed; survives a restart."""
        await _change(
            self._tenants.of(request).reservoir, journal_pb2.Event(paused=journal_pb2.Paused(reason=request.reason))
        )
        return control_pb2.PauseResponse()

    @answering
    async def Resume(self, request: control_pb2.ResumeRequest, context: Any) -> control_pb2.ResumeResponse:
        """Go on."""
        reservoir = self._tenants.of(request).reservoir
        reservoir.draining = False
        await _change(reservoir, journal_pb2.Event(resumed=journal_pb2.Resumed()))
        return control_pb2.ResumeResponse()

    @answering
    async def Drain(self, request: control_pb2.DrainRequest, context: Any) -> control_pb2.DrainResponse:
        """Tell every member to finish what is in flight and leave."""
        reservoir = self._tenants.of(request).reservoir
        reservoir.draining = True
        reservoir.changed()
        return control_pb2.DrainResponse()

    @answering
    async def ReportEval(self, request: control_pb2.ReportEvalRequest, context: Any) -> control_pb2.ReportEvalResponse:
        """A version's score."""
        reservoir = self._tenants.of(request).reservoir
        reservoir.speaker(request.member, request.member.role)
        request.result.at_unix_s = request.result.at_unix_s or reservoir.wall()
        await _change(reservoir, journal_pb2.Event(evaluated=journal_pb2.Evaluated(result=request.result)))
        return control_pb2.ReportEvalResponse()

    @answering
    async def History(self, request: control_pb2.HistoryRequest, context: Any) -> control_pb2.HistoryResponse:
        """Every committed step and every evaluation."""
        reservoir = self._tenants.of(request).reservoir
        steps = reservoir.state.steps
        return control_pb2.HistoryResponse(steps=[steps[step] for step in sorted(steps)], evals=evals_of(reservoir))


async def _change(reservoir: Reservoir, event: journal_pb2.Event) -> None:
    reservoir.record(event)
    await reservoir.durable()
    reservoir.changed()
