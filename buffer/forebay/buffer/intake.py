"""Permits out, groups in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.buffer import admission
from forebay.buffer.errors import CallRefused
from forebay.buffer.evals import Assignment
from forebay.buffer.ledger import MemberKey, MemberRecord, State
from forebay.buffer.reservoir import Reservoir
from forebay.wire.experience import FrameError
from forebay.wire.frame_header import check_whole
from forebay.wire.v1 import common_pb2, experience_pb2, journal_pb2
from forebay.wire.version import Version

Answer = experience_pb2.AppendResponse

FULL_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Received:
    """A frame as it came: its payload taken out of the message once, and what is wrong with it, "" if nothing is."""

    header: experience_pb2.FrameHeader
    payload: bytes
    damage: str

    @classmethod
    def of(cls, frame: experience_pb2.Frame) -> Received:
        """Look at a frame without opening its payload."""
        payload = frame.payload
        try:
            check_whole(frame, payload)
        except FrameError as error:
            return cls(frame.header, payload, str(error) or type(error).__name__)
        return cls(frame.header, payload, "")


class Intake:
    """The samplers' side of the reservoir. Answers may be sent after `Reservoir.durable`."""

    def __init__(self, reservoir: Reservoir) -> None:
        self._reservoir = reservoir

    def admit(self, request: experience_pb2.AdmitRequest) -> experience_pb2.AdmitResponse | None:
        """Permits, an evaluation, or the end; None when there is nothing yet. Raises MemberUnknown, MemberFenced."""
        key, record = self._reservoir.speaker(request.member, common_pb2.ROLE_SAMPLER)
        answer = experience_pb2.AdmitResponse(finished=self._reservoir.finished)
        if answer.finished:
            return answer
        if self._reservoir.state.paused or self._reservoir.draining:
            return None
        repeated = bool(request.request) and request.request == record.request
        answer.permits.extend(self._granted_before(key, record) if repeated else self._grant(request))
        if self._is_to_evaluate(key, request):
            answer.eval.version.CopyFrom(request.held)
        return answer if repeated or answer.permits or answer.HasField("eval") else None

    def why_none(self, request: experience_pb2.AdmitRequest) -> str:
        """What a sampler waits for that got nothing."""
        if self._reservoir.state.paused:
            return f"the run to be resumed (paused: {self._reservoir.state.paused})"
        if self._reservoir.draining:
            return "nothing: the run is draining"
        return admission.why_none(self._reservoir.state, self._reservoir.rules, _held(request))

    def refund(self, request: experience_pb2.RefundRequest) -> None:
        """Take back what will not be produced; what is not outstanding under that attempt was settled before."""
        self._reservoir.speaker(request.member, common_pb2.ROLE_SAMPLER)
        for refund in request.refunds:
            self._check_refund(refund)
        current = {refund.group_id: refund for refund in request.refunds if self._is_current(refund)}
        if current:
            refunded = journal_pb2.Refunded(member=request.member, refunds=current.values())
            self._reservoir.record(journal_pb2.Event(refunded=refunded))
            self._reservoir.permits_changed.notify()

    def append(self, member: common_pb2.Member, frame: Received) -> Answer:
        """Take a frame. Raises MemberUnknown, MemberFenced."""
        _, record = self._reservoir.speaker(member, common_pb2.ROLE_SAMPLER)
        header = frame.header
        expected = record.next_sequence
        if header.sequence > expected:
            return Answer(outcome=Answer.OUT_OF_SEQUENCE, sequence=header.sequence, expected_sequence=expected)
        if header.sequence < expected:
            return _sent_before(record, header)
        full = self._reservoir.no_room()
        if full:
            return Answer(outcome=Answer.FULL, sequence=header.sequence, detail=full, retry_after_s=self._retry_s())
        refusal = frame.damage or self._refusal(member, record, header)
        return self._refuse(member, header, refusal) if refusal else self._store(frame)

    def _grant(self, request: experience_pb2.AdmitRequest) -> Sequence[experience_pb2.Permit]:
        reservoir = self._reservoir
        permits = admission.permits_for(reservoir.state, reservoir.rules, _held(request), request.groups)
        if permits:
            granted = journal_pb2.Granted(member=request.member, permits=permits, request=request.request)
            reservoir.record(journal_pb2.Event(granted=granted))
            reservoir.permits_granted(permit.group_id for permit in permits)
        return permits

    def _is_to_evaluate(self, key: MemberKey, request: experience_pb2.AdmitRequest) -> bool:
        asking = Assignment(member=key, incarnation=request.member.incarnation, request=request.request)
        return self._reservoir.evals.order(self._reservoir.state, self._reservoir.rules, asking, _held(request))

    def _granted_before(self, key: MemberKey, record: MemberRecord) -> list[experience_pb2.Permit]:
        """What the same request got before its answer was lost, as far as it still holds."""
        permits = self._reservoir.state.permits
        return [
            experience_pb2.Permit(group_id=group_id, attempt=attempt)
            for group_id, attempt in record.request_permits
            if group_id in permits and permits[group_id].holder == key and permits[group_id].attempt == attempt
        ]

    def _is_current(self, refund: experience_pb2.Refund) -> bool:
        permit = self._reservoir.state.permits.get(refund.group_id)
        return permit is not None and permit.attempt == refund.attempt

    def _check_refund(self, refund: experience_pb2.Refund) -> None:
        """What is said of a filtered group goes into the ledger. Raises CallRefused."""
        known = Version.from_proto(refund.oldest) in self._reservoir.state.published
        if refund.trajectories and not (known and refund.trajectories <= self._reservoir.rules.group_size):
            raise CallRefused(
                f"group {refund.group_id} is refunded with {refund.trajectories} trajectories of version "
                f"{Version.from_proto(refund.oldest)}: expected at most {self._reservoir.rules.group_size}, published"
            )

    def _store(self, frame: Received) -> Answer:
        superseded = [group.group_id for group in frame.header.groups if self._reservoir.state.is_done(group.group_id)]
        payload = b"" if len(superseded) == len(frame.header.groups) else frame.payload
        appended = journal_pb2.Appended(header=frame.header, superseded=superseded)
        self._reservoir.record(journal_pb2.Event(appended=appended), payload)
        self._reservoir.groups_changed.notify()
        detail = f"superseded: {superseded}" if superseded else ""
        return Answer(outcome=Answer.STORED, sequence=frame.header.sequence, detail=detail)

    def _retry_s(self) -> float:
        """The more streams push, the less often each: all together they must not keep the other runs busy."""
        return FULL_RETRY_S * max(1.0, self._reservoir.streams / 20)

    def _refuse(self, member: common_pb2.Member, header: experience_pb2.FrameHeader, refusal: str) -> Answer:
        refused = journal_pb2.Refused(member=member, sequence=header.sequence, detail=refusal[:500])
        self._reservoir.record(journal_pb2.Event(refused=refused))
        return Answer(outcome=Answer.REFUSED, sequence=header.sequence, detail=refusal[:500])

    def _refusal(self, member: common_pb2.Member, record: MemberRecord, header: experience_pb2.FrameHeader) -> str:
        rules = self._reservoir.rules
        said = (header.run, header.sampler, header.incarnation, header.fleet)
        joined = (rules.run, member.id, member.incarnation, record.fleet)
        if said != joined:
            return f"the frame says run, sampler, incarnation and fleet {said}, its sender joined as {joined}"
        group_ids = [group.group_id for group in header.groups]
        if len(set(group_ids)) < len(group_ids) or not group_ids:
            return f"a frame holds each of its groups once, and at least one: got {group_ids}"
        refusals = (_group_refusal(self._reservoir.state, rules.group_size, group) for group in header.groups)
        return next(filter(None, refusals), "")


def _group_refusal(state: State, group_size: int, group: experience_pb2.GroupHeader) -> str:
    if group.group_id >= state.next_group:
        return f"group {group.group_id} was never granted"
    if not 1 <= group.members <= group_size:
        return f"group {group.group_id} has {group.members} members: expected 1 to {group_size}"
    for version in (Version.from_proto(group.oldest), Version.from_proto(group.newest)):
        if version not in state.published:
            return f"group {group.group_id} was generated by version {version}, which was never published"
    return ""


def _sent_before(record: MemberRecord, header: experience_pb2.FrameHeader) -> Answer:
    before = record.recent.get(header.sequence, header.payload_xxh3)
    answer = Answer(outcome=Answer.DUPLICATE, sequence=header.sequence, expected_sequence=record.next_sequence)
    if isinstance(before, str):
        answer.outcome, answer.detail = Answer.REFUSED, before
    elif before != header.payload_xxh3:
        answer.outcome = Answer.REFUSED
        answer.detail = f"sequence {header.sequence} was sent before with other content"
    return answer


def _held(request: experience_pb2.AdmitRequest) -> Version | None:
    return Version.from_proto(request.held) if request.HasField("held") else None
