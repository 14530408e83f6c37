"""A State as a message, and back: nothing of it is lost, `released` excepted, which the caller chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forebay.buffer.ledger import (
    Batch,
    FrameEntry,
    Group,
    MemberRecord,
    Outstanding,
    Publication,
    Sampled,
    State,
    member_key,
)
from forebay.buffer.records import Position
from forebay.buffer.tally import Counts, Tally
from forebay.wire.v1 import experience_pb2, journal_pb2
from forebay.wire.version import Version

FORMAT = 1
Snapshot = journal_pb2.Snapshot


def to_message(state: State, released: Sequence[Position]) -> Snapshot:
    """Everything that `state` knows, and the positions of `released` payloads; segment and LSN are left to set."""
    return Snapshot(
        format=FORMAT,
        run_json=state.run_json,
        members=[_member(key[0], record) for key, record in state.members.items()],
        next_group=state.next_group,
        given_back=state.given_back,
        permits=[_permit(group_id, permit) for group_id, permit in state.permits.items()],
        again=[experience_pb2.Permit(group_id=group, attempt=attempt) for group, attempt in state.again.items()],
        groups=_groups(state),
        frames=_frames([entry.position for entry in state.frames.values()], [e.live for e in state.frames.values()]),
        batches=[_batch(step, batch) for step, batch in state.batches.items()],
        sampled=[
            journal_pb2.SnapshotSampled(group_id=group, times=one.times, live=one.live, final=one.final)
            for group, one in state.sampled.items()
        ],
        committed=state.committed,
        checkpoint=state.checkpoint,
        final=state.final,
        checkpoints=state.checkpoints,
        published=[_publication(version, entry) for version, entry in state.published.items()],
        tallies=[row for key, tally in state.tallies.items() for row in _tally(*key, tally)],
        refunds=[
            journal_pb2.SnapshotRefunds(fleet=fleet, reason=reason, groups=groups)
            for (fleet, reason), groups in state.refunds.items()
        ],
        steps=state.steps.values(),
        evals=state.evals.values(),
        paused=state.paused,
        released=_frames(released, [0] * len(released)),
    )


def from_message(message: Snapshot) -> State:
    """The state that `to_message` saw; its `released` are the message's."""
    state = State(
        run_json=message.run_json,
        next_group=message.next_group,
        given_back=message.given_back,
        again={permit.group_id: permit.attempt for permit in message.again},
        committed=message.committed,
        checkpoint=message.checkpoint,
        final=message.final,
        checkpoints=list(message.checkpoints),
        refunds={(row.fleet, row.reason): row.groups for row in message.refunds},
        steps={record.step: record for record in message.steps},
        evals={Version.from_proto(result.version): result for result in message.evals},
        paused=message.paused,
        released=[position for position, _ in _read_frames(message.released)],
    )
    state.members = {(row.role, _key_id(row)): _read_member(row) for row in message.members}
    state.permits = {row.group_id: _read_permit(row) for row in message.permits}
    state.frames = {p.lsn: FrameEntry(position=p, live=live) for p, live in _read_frames(message.frames)}
    state.batches = {row.step: _read_batch(row) for row in message.batches}
    state.sampled = {row.group_id: Sampled(row.times, row.live, row.final) for row in message.sampled}
    state.published = {Version.from_proto(row.version): _read_publication(row) for row in message.published}
    _read_tallies(state, message.tallies)
    _read_groups(state, message.groups)
    return state


# Groups and frames: there may be a million


def _groups(state: State) -> journal_pb2.SnapshotGroups:
    groups = list(state.groups.values())
    fleets = {fleet: number for number, fleet in enumerate(dict.fromkeys(group.fleet for group in groups))}
    return journal_pb2.SnapshotGroups(
        group_id=[group.group_id for group in groups],
        lsn=[group.lsn for group in groups],
        index=[group.index for group in groups],
        fleet=[fleets[group.fleet] for group in groups],
        incarnation=[group.oldest.incarnation for group in groups],
        oldest_step=[group.oldest.step for group in groups],
        step=[group.step for group in groups],
        arrival_step=[group.arrival_step for group in groups],
        priority=[group.priority for group in groups],
        trajectories=[group.counts.trajectories for group in groups],
        tokens=[group.counts.tokens for group in groups],
        buffered=[group.group_id in state.buffered for group in groups],
        fleets=fleets,
    )


def _read_groups(state: State, table: journal_pb2.SnapshotGroups) -> None:
    fleets, versions = list(table.fleets), dict[tuple[int, int], Version]()
    columns = (
        table.group_id, table.lsn, table.index, table.fleet, table.incarnation, table.oldest_step, table.step,
        table.arrival_step, table.priority, table.trajectories, table.tokens, table.buffered,
    )  # fmt: skip
    for group_id, lsn, index, fleet, incarnation, oldest, step, arrival, priority, members, tokens, here in zip(
        *columns, strict=True
    ):
        version = versions.setdefault((incarnation, oldest), Version(incarnation, oldest))
        group = Group(
            group_id=group_id, lsn=lsn, index=index, fleet=fleets[fleet], oldest=version, step=step,
            arrival_step=arrival, priority=priority, counts=Counts(1, members, tokens),
        )  # fmt: skip
        state.groups[group_id] = group
        if here:
            state.buffered.add(group, used=group_id in state.sampled)


def _frames(positions: Sequence[Position], live: Sequence[int]) -> journal_pb2.SnapshotFrames:
    return journal_pb2.SnapshotFrames(
        lsn=[position.lsn for position in positions],
        segment=[position.segment for position in positions],
        offset=[position.offset for position in positions],
        event_bytes=[position.event_bytes for position in positions],
        payload_bytes=[position.payload_bytes for position in positions],
        live=live,
    )


def _read_frames(table: journal_pb2.SnapshotFrames) -> list[tuple[Position, int]]:
    columns = (table.lsn, table.segment, table.offset, table.event_bytes, table.payload_bytes, table.live)
    return [
        (Position(lsn=lsn, segment=segment, offset=offset, event_bytes=event, payload_bytes=payload), live)
        for lsn, segment, offset, event, payload, live in zip(*columns, strict=True)
    ]


# Members and permits


def _member(role: int, record: MemberRecord) -> journal_pb2.SnapshotMember:
    answered = [
        journal_pb2.SnapshotMember.Answered(
            sequence=sequence,
            payload_xxh3=0 if isinstance(answer, str) else answer,
            refused=answer if isinstance(answer, str) else "",
            is_refused=isinstance(answer, str),
        )
        for sequence, answer in record.recent.items()
    ]
    return journal_pb2.SnapshotMember(
        role=role,  # type: ignore[arg-type]
        id=record.id, incarnation=record.incarnation, fleet=record.fleet, region=record.region, left=record.left,
        next_sequence=record.next_sequence, answered=answered, request=record.request,
        request_permits=[experience_pb2.Permit(group_id=g, attempt=a) for g, a in record.request_permits],
        groups=record.groups, tokens=record.tokens,
    )  # fmt: skip


def _read_member(row: journal_pb2.SnapshotMember) -> MemberRecord:
    return MemberRecord(
        row.id, row.incarnation, row.fleet, row.region,
        left=row.left, next_sequence=row.next_sequence,
        recent={one.sequence: one.refused if one.is_refused else one.payload_xxh3 for one in row.answered},
        request=row.request,
        request_permits=tuple((permit.group_id, permit.attempt) for permit in row.request_permits),
        groups=row.groups, tokens=row.tokens,
    )  # fmt: skip


def _key_id(row: journal_pb2.SnapshotMember) -> str:
    return member_key(row.role, row.id)[1]


def _permit(group_id: int, permit: Outstanding) -> journal_pb2.SnapshotPermit:
    role, member_id = permit.holder
    return journal_pb2.SnapshotPermit(
        group_id=group_id,
        attempt=permit.attempt,
        role=role,  # type: ignore[arg-type]
        id=member_id,
        incarnation=permit.incarnation,
    )


def _read_permit(row: journal_pb2.SnapshotPermit) -> Outstanding:
    return Outstanding(attempt=row.attempt, holder=(row.role, row.id), incarnation=row.incarnation)


# Steps, versions, counts


def _batch(step: int, batch: Batch) -> journal_pb2.SnapshotBatch:
    return journal_pb2.SnapshotBatch(
        step=step, attempt=batch.attempt, group_ids=batch.group_ids, incarnation=batch.incarnation, tries=batch.tries
    )


def _read_batch(row: journal_pb2.SnapshotBatch) -> Batch:
    return Batch(attempt=row.attempt, group_ids=tuple(row.group_ids), incarnation=row.incarnation, tries=row.tries)


def _publication(version: Version, entry: Publication) -> journal_pb2.SnapshotPublication:
    return journal_pb2.SnapshotPublication(
        version=version.to_proto(), digest=entry.digest, payload_bytes=entry.payload_bytes,
        model_bytes=entry.model_bytes, void=entry.void,
    )  # fmt: skip


def _read_publication(row: journal_pb2.SnapshotPublication) -> Publication:
    return Publication(digest=row.digest, payload_bytes=row.payload_bytes, model_bytes=row.model_bytes, void=row.void)


def _tally(fleet: str, version: Version, tally: Tally) -> Iterable[experience_pb2.LedgerRow]:
    counted = {"produced": tally.produced, "final": tally.final}
    for state, counts in [*counted.items(), *tally.dropped.items()]:
        yield experience_pb2.LedgerRow(
            fleet=fleet, version=version.to_proto(), state=state if state in counted else f"dropped:{state}",
            groups=counts.groups, trajectories=counts.trajectories, tokens=counts.tokens,
        )  # fmt: skip


def _read_tallies(state: State, rows: Iterable[experience_pb2.LedgerRow]) -> None:
    for row in rows:
        tally = state.tallies.setdefault((row.fleet, Version.from_proto(row.version)), Tally())
        counts = Counts(row.groups, row.trajectories, row.tokens)
        if row.state == "produced":
            tally.produced = counts
        elif row.state == "final":
            tally.final = counts
        else:
            tally.dropped[row.state.removeprefix("dropped:")] = counts
