"""The Control service over the reservoir."""

from __future__ import annotations

from typing import Any

from forebay.buffer.calls import answering
from forebay.buffer.errors import MemberFenced
from forebay.buffer.reservoir import Reservoir
from forebay.buffer.roster import Roster
from forebay.buffer.status import evals_of, status_of
from forebay.wire.v1 import control_pb2, control_pb2_grpc, journal_pb2


class ControlService(control_pb2_grpc.ControlServicer):
    """Who takes part, what they do, what they wait for."""

    def __init__(self, reservoir: Reservoir, roster: Roster) -> None:
        self._reservoir, self._roster = reservoir, roster

    @answering
    async def Join(self, request: control_pb2.JoinRequest, context: Any) -> control_pb2.JoinResponse:
        """Grant an incarnation."""
        member = self._roster.join(request)
        await self._reservoir.durable()
        return control_pb2.JoinResponse(
            member=member,
            run=self._reservoir.rules.run,
            heartbeat_s=self._reservoir.members.timeout_s / 5,
            committed_step=self._reservoir.state.committed,
            checkpoint_step=self._reservoir.state.checkpoint,
        )

    @answering
    async def Heartbeat(self, request: control_pb2.HeartbeatRequest, context: Any) -> control_pb2.HeartbeatResponse:
        """Note what a member does; tell it what is wanted of it."""
        answer = control_pb2.HeartbeatResponse(
            drain=self._reservoir.draining,
            paused=bool(self._reservoir.state.paused),
            finished=self._reservoir.finished,
        )
        try:
            self._roster.heartbeat(request)
        except MemberFenced:
            answer.fenced = True
        return answer

    @answering
    async def Leave(self, request: control_pb2.LeaveRequest, context: Any) -> control_pb2.LeaveResponse:
        """A member goes; its permits go to others."""
        self._roster.leave(request)
        await self._reservoir.durable()
        return control_pb2.LeaveResponse()

    @answering
    async def Status(self, request: control_pb2.StatusRequest, context: Any) -> control_pb2.StatusResponse:
        """One coherent look."""
        return status_of(self._reservoir)

    @answering
    async def Pause(self, request: control_pb2.PauseRequest, context: Any) -> control_pb2.PauseResponse:
        """No permits and no batches until resumed; survives a restart."""
        await self._change(journal_pb2.Event(paused=journal_pb2.Paused(reason=request.reason)))
        return control_pb2.PauseResponse()

    @answering
    async def Resume(self, request: control_pb2.ResumeRequest, context: Any) -> control_pb2.ResumeResponse:
        """Go on."""
        self._reservoir.draining = False
        await self._change(journal_pb2.Event(resumed=journal_pb2.Resumed()))
        return control_pb2.ResumeResponse()

    @answering
    async def Drain(self, request: control_pb2.DrainRequest, context: Any) -> control_pb2.DrainResponse:
        """Tell every member to finish what is in flight and leave."""
        self._reservoir.draining = True
        self._reservoir.changed()
        return control_pb2.DrainResponse()

    @answering
    async def ReportEval(self, request: control_pb2.ReportEvalRequest, context: Any) -> control_pb2.ReportEvalResponse:
        """A version's score."""
        self._reservoir.speaker(request.member, request.member.role)
        request.result.at_unix_s = request.result.at_unix_s or self._reservoir.wall()
        await self._change(journal_pb2.Event(evaluated=journal_pb2.Evaluated(result=request.result)))
        return control_pb2.ReportEvalResponse()

    @answering
    async def History(self, request: control_pb2.HistoryRequest, context: Any) -> control_pb2.HistoryResponse:
        """Every committed step and every evaluation."""
        steps = self._reservoir.state.steps
        return control_pb2.HistoryResponse(
            steps=[steps[step] for step in sorted(steps)], evals=evals_of(self._reservoir)
        )

    async def _change(self, event: journal_pb2.Event) -> None:
        self._reservoir.record(event)
        await self._reservoir.durable()
        self._reservoir.changed()
