"""Joining, beating, leaving and getting lost."""

from __future__ import annotations

import logging

from forebay.buffer import admission
from forebay.buffer.errors import RunDiffers
from forebay.buffer.ledger import MemberKey, member_key
from forebay.buffer.members import Liveness
from forebay.buffer.reservoir import Reservoir
from forebay.config.identity import differences
from forebay.wire.v1 import common_pb2, control_pb2, experience_pb2, journal_pb2
from forebay.wire.version import Version

log = logging.getLogger(__name__)


class Roster:
    """Who takes part. Permits of whoever goes are granted to others."""

    def __init__(self, reservoir: Reservoir) -> None:
        self._reservoir = reservoir

    def join(self, request: control_pb2.JoinRequest) -> common_pb2.Member:
        """Grant the next incarnation, which fences earlier ones. Raises RunDiffers."""
        diff = differences(self._reservoir.state.run_json, request.run_json)
        if diff:
            raise RunDiffers("\n".join(diff))
        key = member_key(request.role, request.id)
        before = self._reservoir.state.members.get(key)
        member = common_pb2.Member(
            role=request.role,
            id=request.id,
            incarnation=(before.incarnation if before else 0) + 1,
            run=self._reservoir.rules.run,
        )
        joined = journal_pb2.Joined(member=member, fleet=request.fleet, region=request.region)
        self._reservoir.record(journal_pb2.Event(joined=joined))
        self._reservoir.members.joined(key, member.incarnation)
        self._expire(key, before=member.incarnation)
        return member

    def heartbeat(self, request: control_pb2.HeartbeatRequest) -> None:
        """Note what the member is doing. Raises MemberUnknown, MemberFenced."""
        key, _ = self._reservoir.speaker(request.member, request.member.role)
        self._note(self._reservoir.members.seen(key), request)

    def leave(self, request: control_pb2.LeaveRequest) -> None:
        """The member is done; what it had in hand goes to others. Raises MemberUnknown, MemberFenced."""
        key, _ = self._reservoir.speaker(request.member, request.member.role)
        self._reservoir.record(journal_pb2.Event(left=journal_pb2.Left(member=request.member, reason=request.reason)))
        self._reservoir.members.left(key)
        self._expire(key)

    def sweep(self) -> list[str]:
        """Take the permits of lost members back; ids of those that held some."""
        self._expire_overdue()
        return [key[1] for key in self._reservoir.members.sweep() if self._expire(key)]

    def _expire_overdue(self) -> None:
        """Permits that a live sampler holds for too long are granted to others; should it deliver, the first counts."""
        permits = self._reservoir.state.permits
        overdue = [
            experience_pb2.Permit(group_id=group_id, attempt=permits[group_id].attempt)
            for group_id in self._reservoir.overdue_permits()
        ]
        if overdue:
            log.warning("groups %s are overdue: granted to other samplers", [permit.group_id for permit in overdue])
            self._reservoir.record(journal_pb2.Event(expired=journal_pb2.Expired(permits=overdue)))
            self._reservoir.permits_changed.notify()

    def _expire(self, key: MemberKey, before: int | None = None) -> bool:
        permits = admission.held_by(self._reservoir.state, key, before)
        if permits:
            member = common_pb2.Member(role=common_pb2.ROLE_SAMPLER, id=key[1])
            self._reservoir.record(journal_pb2.Event(expired=journal_pb2.Expired(member=member, permits=permits)))
            self._reservoir.permits_changed.notify()
        return bool(permits)

    def _note(self, entry: Liveness, request: control_pb2.HeartbeatRequest) -> None:
        entry.doing = request.doing
        entry.doing_since = self._reservoir.clock() - request.since_s
        entry.version = Version.from_proto(request.version) if request.HasField("version") else None
        entry.digest = request.digest
        entry.gauges = dict(request.gauges)
