"""A journal that gives a fresh learner the recorded batches again: the groups of some steps, already leased.

It is made anew rather than copied: of the old run only the frames of those steps count, the rest of the group ids is
booked as never produced. Nothing is committed beyond the checkpoint that the learner starts from, so the buffer leases
each step exactly as it was journalled, and asks no sampler for anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from forebay.buffer.journal import Journal
from forebay.buffer.recording import Recording, taken
from forebay.buffer.recovery import recover
from forebay.buffer.replay import Steps
from forebay.buffer.segment_walk import read_records
from forebay.errors import UsageError
from forebay.wire.v1 import common_pb2, experience_pb2, journal_pb2

_REPLAYER = common_pb2.Member(role=common_pb2.ROLE_SAMPLER, id="replay", incarnation=1)
_IDS_AN_EVENT = 50_000
_PENDING_BYTES = 64 << 20
Event = journal_pb2.Event


def choose_steps(recording: Recording, wanted: Steps, checkpoints: Iterable[int]) -> range:
    """The steps that a replay trains: `wanted`, or all from the first that can be. Raises UsageError, saying what can.

    A replay starts from the initial weights (step 1) or behind one of the `checkpoints`.
    """
    first, starts = wanted.first or 1, {0, *checkpoints}
    last = wanted.last or max((until for since, until in recording.whole_steps() if since <= first), default=first)
    why = _obstacle(recording, first, last, starts)
    if why:
        raise UsageError(f"steps {first} to {last} cannot be replayed: {why}; {_possible(recording, starts)}")
    return range(first, last + 1)


def write_journal(recording: Recording, steps: range, folder: Path) -> None:
    """Write the journal of a replay of `steps` into the empty `folder`. Raises JournalDamaged, JournalFailed."""
    journal = Journal(folder, recover(folder, repair=True).tail)
    try:
        for event, payload in _events(recording, steps):
            journal.append(event, payload)
            if journal.pending_bytes > _PENDING_BYTES:
                journal.flush()
    finally:
        journal.close()


def _obstacle(recording: Recording, first: int, last: int, starts: set[int]) -> str:
    missing = [step for step in range(first, last + 1) if not recording.is_whole(step)]
    if last > recording.committed:
        return f"the run has committed {recording.committed} steps"
    if missing:
        return f"the experience of step {missing[0]} is released"
    return "" if first - 1 in starts else f"there is no checkpoint {first - 1} to start from"


def _possible(recording: Recording, starts: set[int]) -> str:
    found = [
        f"--steps {start}:{last}"
        for first, last in recording.whole_steps()
        for start in [min((step + 1 for step in starts if first <= step + 1 <= last), default=0)]
        if start
    ]
    kept = "a later run keeps more with a larger [buffer] retain_gb"
    return f"possible: {' or '.join(found)}" if found else f"no step of this run can be replayed any more; {kept}"


def _events(recording: Recording, steps: range) -> Iterator[tuple[Event, bytes]]:
    batches = {step: groups for step, groups in recording.batches.items() if step in steps}
    replayed = {group for groups in batches.values() for group in groups}
    yield Event(run_opened=journal_pb2.RunOpened(run_json=recording.run_json)), b""
    yield from _bare(_permits(replayed))
    yield from _frames(recording, replayed)
    yield from _bare(_learner(recording, steps, batches))


def _bare(events: Iterable[Event]) -> Iterator[tuple[Event, bytes]]:
    return ((event, b"") for event in events)


def _permits(replayed: set[int]) -> Iterator[Event]:
    """Every group id up to the last is granted; those that are not replayed are given back."""
    yield Event(joined=journal_pb2.Joined(member=_REPLAYER, fleet=_REPLAYER.id))
    ids = range(max(replayed) + 1)
    for start in range(0, len(ids), _IDS_AN_EVENT):
        part = ids[start : start + _IDS_AN_EVENT]
        permits = [experience_pb2.Permit(group_id=group, attempt=1) for group in part]
        yield Event(granted=journal_pb2.Granted(member=_REPLAYER, permits=permits))
        refunds = [
            experience_pb2.Refund(group_id=group, attempt=1, reason="not_replayed")
            for group in part
            if group not in replayed
        ]
        yield Event(refunded=journal_pb2.Refunded(member=_REPLAYER, refunds=refunds))
    yield Event(left=journal_pb2.Left(member=_REPLAYER))


def _frames(recording: Recording, replayed: set[int]) -> Iterator[tuple[Event, bytes]]:
    """The frames with replayed groups, each after its sampler has joined."""
    joined: dict[str, int] = {}
    for record in read_records(recording.journal):
        event = record.parsed()
        groups = taken(event.appended)
        if replayed.isdisjoint(groups):
            continue
        header = event.appended.header
        member = common_pb2.Member(role=common_pb2.ROLE_SAMPLER, id=header.sampler, incarnation=header.incarnation)
        if joined.get(header.sampler) != header.incarnation:
            joined[header.sampler] = header.incarnation
            yield from _bare(
                [Event(joined=journal_pb2.Joined(member=member, fleet=header.fleet, region=header.region))]
            )
            yield from _bare([Event(left=journal_pb2.Left(member=member))])
        others = [group.group_id for group in header.groups if group.group_id not in replayed.intersection(groups)]
        appended = journal_pb2.Appended(header=header, superseded=others)
        yield Event(at_unix_s=event.at_unix_s, appended=appended), record.payload


def _learner(recording: Recording, steps: range, batches: dict[int, tuple[int, ...]]) -> Iterator[Event]:
    """The recorded learner has leased the batches and is gone; what it had done before them is committed."""
    gone, next_one = (
        common_pb2.Member(role=common_pb2.ROLE_LEARNER, id="learner", incarnation=recording.learner_incarnation + later)
        for later in (0, 1)
    )
    yield Event(joined=journal_pb2.Joined(member=gone, region="center"))
    for step, groups in sorted(batches.items()):
        again = [
            group for group in groups if any(later > step and later in batches for later in recording.steps[group])
        ]
        leased = journal_pb2.Leased(member=next_one, step=step, attempt=1, group_ids=groups, reusable=again)
        yield Event(leased=leased)  # in the coming learner's name: nobody has failed at this batch yet
    if steps[0] > 1:
        yield Event(committed=journal_pb2.Committed(member=gone, step=steps[0] - 1, metrics_json="{}"))
    yield Event(left=journal_pb2.Left(member=gone))
