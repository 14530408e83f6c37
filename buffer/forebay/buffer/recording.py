"""What a run's journal remembers of its experience: which groups each step trained, and whether their frames remain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from forebay.buffer.ledger import State
from forebay.buffer.recovery import recover
from forebay.buffer.segment_walk import Walked, read_records, segment_files
from forebay.errors import UsageError
from forebay.wire.v1 import journal_pb2


@dataclass(slots=True)
class Recording:
    """The index of a journal folder. Steps count from 1; a group's frame is known by the LSN of its record."""

    journal: Path
    run_json: str
    committed: int
    learner_incarnation: int
    published: dict[int, bytes]  #: step → digest of its weights, void versions left out
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)  #: step → groups, as leased
    frames: dict[int, int] = field(default_factory=dict)  #: group → LSN of the frame that counts
    dropped: dict[int, str] = field(default_factory=dict)  #: group → reason
    released: set[int] = field(default_factory=set)  #: LSN of frames whose payload is gone
    steps: dict[int, list[int]] = field(default_factory=dict)  #: group → steps, ascending; several when it was reused

    def state_of(self, group_id: int) -> str:
        """buffered | leased | trained | dropped:REASON."""
        steps = self.steps.get(group_id)
        if steps is not None:
            return "trained" if steps[0] <= self.committed else "leased"
        return f"dropped:{self.dropped[group_id]}" if group_id in self.dropped else "buffered"

    def is_whole(self, step: int) -> bool:
        """Whether every frame of the step's batch can still be read."""
        groups = self.batches.get(step, ())
        return bool(groups) and all(
            group in self.frames and self.frames[group] not in self.released for group in groups
        )

    def whole_steps(self) -> list[tuple[int, int]]:
        """Ranges (first, last) of committed steps whose batches can still be read, as long as they go."""
        return as_ranges(step for step in sorted(self.batches) if step <= self.committed and self.is_whole(step))


def read_recording(home: Path) -> Recording:
    """Index the journal of a run folder, of a stopped or running buffer; changes nothing.

    Raises UsageError when there is none, JournalDamaged when it cannot be read.
    """
    folder = home / "buffer" / "journal"
    if not segment_files(folder):
        raise UsageError(f"{folder}: no journal here; expected the folder of a run that was started")
    state = recover(folder, repair=False).state
    recording = Recording(
        folder,
        run_json=state.run_json,
        committed=state.committed,
        learner_incarnation=state.learner.incarnation if state.learner is not None else 0,
        published=_published(state),
    )
    for record in read_records(folder):
        _note(recording, record)
    for step in sorted(recording.batches):
        for group in recording.batches[step]:
            recording.steps.setdefault(group, []).append(step)
    return recording


def taken(appended: journal_pb2.Appended) -> list[int]:
    """Groups of a frame that count; the others had arrived before."""
    superseded = set(appended.superseded)
    return [group.group_id for group in appended.header.groups if group.group_id not in superseded]


def as_ranges(steps: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, last) of each unbroken stretch."""
    ranges: list[tuple[int, int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    return ranges


def in_words(ranges: Iterable[tuple[int, int]]) -> str:
    """`1 to 4, 7`."""
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in ranges) or "none"


def _note(recording: Recording, record: Walked) -> None:
    event = record.parsed()
    match event.WhichOneof("kind"):
        case "leased":
            recording.batches[event.leased.step] = tuple(event.leased.group_ids)
        case "rejected":
            recording.batches.pop(event.rejected.step, None)  # leased again with other groups
            recording.dropped.update(dict.fromkeys(event.rejected.group_ids, event.rejected.reason))
        case "dropped":
            recording.dropped.update(dict.fromkeys(event.dropped.group_ids, event.dropped.reason))
        case "appended":
            recording.frames.update(dict.fromkeys(taken(event.appended), record.lsn))
            if not record.intact:
                recording.released.add(record.lsn)


def _published(state: State) -> dict[int, bytes]:
    """By step; of several incarnations' the newest one's, which is the run's."""
    valid = sorted(version for version, entry in state.published.items() if not entry.void)
    return {version.step: state.published[version].digest for version in valid}
