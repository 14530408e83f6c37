"""What clients were promised, and whether the journal kept it.

Clients note each promise when they get it; `check` reads the journal record by record, with a reader and a fold of its
own, and finds: acknowledged frames that are missing or there twice, frames of one producer out of order, groups that
count twice, groups in two trained steps of one lineage, steps trained with other groups than were leased, and states
that do not add up to what was accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forebay.buffer.conservation import imbalances, ledger_response
from forebay.buffer.ledger import State
from forebay.buffer.recording import taken
from forebay.buffer.recovery import recover
from forebay.buffer.segment_walk import read_records
from forebay.wire.v1 import experience_pb2, journal_pb2

#: Sampler, incarnation, sequence.
FrameKey = tuple[str, int, int]


@dataclass(slots=True)
class Journalled:
    """What a journal says happened, folded as simply as possible."""

    frames: list[tuple[FrameKey, int]] = field(default_factory=list)  #: with the payload's xxh3, in order of LSN
    refused: list[FrameKey] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)  #: groups that count, in order of arrival
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)  #: committed steps of the current lineage
    dropped: list[int] = field(default_factory=list)
    final: int = 0
    problems: list[str] = field(default_factory=list)

    def apply(self, event: journal_pb2.Event) -> None:
        """Take one event in."""
        match event.WhichOneof("kind"):
            case "appended":
                header = event.appended.header
                key = (header.sampler, header.incarnation, header.sequence)
                self.frames.append((key, header.payload_xxh3))
                self.taken += taken(event.appended)
            case "refused":
                refused = event.refused
                self.refused.append((refused.member.id, refused.member.incarnation, refused.sequence))
            case "leased":
                self._leased(event.leased.step, tuple(event.leased.group_ids))
            case "committed":
                self._committed(event.committed)
            case "rejected":
                del self.batches[event.rejected.step]
                self.dropped += event.rejected.group_ids
            case "rewound":
                self._rewound(event.rewound.checkpoint_step)
            case "dropped":
                self.dropped += event.dropped.group_ids

    def _leased(self, step: int, groups: tuple[int, ...]) -> None:
        known = self.batches.setdefault(step, groups)
        if known != groups:
            self.problems.append(f"step {step} was leased as {known} and later as {groups}")

    def _committed(self, committed: journal_pb2.Committed) -> None:
        if committed.step in self.batches:
            self.trained[committed.step] = self.batches[committed.step]
        self.final = max(self.final, committed.final_step)

    def _rewound(self, step: int) -> None:
        if step < self.final:
            self.problems.append(f"rewound to {step}, before the final step {self.final}")
        self.trained = {known: groups for known, groups in self.trained.items() if known <= step}


@dataclass(slots=True)
class History:
    """The clients' side. Note a promise when, and only when, the answer that makes it has arrived."""

    stored: dict[FrameKey, int] = field(default_factory=dict)
    refused: set[FrameKey] = field(default_factory=set)
    leases: dict[int, tuple[int, ...]] = field(default_factory=dict)
    commits: dict[int, tuple[int, ...]] = field(default_factory=dict)  #: of the current lineage
    rewinds: int = 0
    problems: list[str] = field(default_factory=list)

    def acknowledged(self, frame: experience_pb2.Frame) -> None:
        """A durable STORED or DUPLICATE for this frame."""
        header = frame.header
        self.stored[header.sampler, header.incarnation, header.sequence] = header.payload_xxh3

    def turned_away(self, frame: experience_pb2.Frame) -> None:
        """A durable REFUSED."""
        self.refused.add((frame.header.sampler, frame.header.incarnation, frame.header.sequence))

    def leased(self, step: int, groups: Sequence[int]) -> None:
        """The learner was given this batch."""
        known = self.leases.setdefault(step, tuple(groups))
        if known != tuple(groups):
            self.problems.append(f"the learner was given {known} for step {step}, and later {tuple(groups)}")

    def rejected(self, step: int) -> None:
        """The batch was put aside: another one will come."""
        self.leases.pop(step, None)

    def committed(self, step: int) -> None:
        """The commit of a leased step was answered."""
        self.commits[step] = self.leases[step]

    def rewound(self, step: int) -> None:
        """The learner went back; what it trained after `step` is void."""
        self.rewinds += 1
        self.commits = {known: groups for known, groups in self.commits.items() if known <= step}

    def check(self, *folders: Path) -> list[str]:
        """Everything that is wrong; the last of `folders` is the live journal, those before hold dropped segments."""
        found = journalled(folders)
        state = recover(folders[-1], repair=False).state
        return [
            *self.problems,
            *found.problems,
            *self._frames(found),
            *_order(found),
            *self._training(found),
            *_states(found, state),
            *imbalances(ledger_response(state)),
        ]

    def _frames(self, found: Journalled) -> list[str]:
        there = dict(found.frames)
        lost = [key for key, digest in self.stored.items() if there.get(key) != digest]
        unspent = self.refused - set(found.refused)
        return [
            *(f"frame {key} was acknowledged and is lost, or is another one" for key in lost),
            *(f"frame {key} was refused, but is not known" for key in sorted(unspent)),
            *_twice("frame", [key for key, _ in found.frames] + found.refused),
            *_twice("group", found.taken),
        ]

    def _training(self, found: Journalled) -> list[str]:
        trained = [group for groups in found.trained.values() for group in groups]
        differs = [step for step, groups in self.commits.items() if found.trained.get(step) != groups]
        return [
            *_twice("trained group", trained),
            *(f"step {step} was committed as {self.commits[step]}: {found.trained.get(step)}" for step in differs),
            *(f"group {group} was trained and never arrived" for group in sorted(set(trained) - set(found.taken))),
        ]


def journalled(folders: Iterable[Path]) -> Journalled:
    """Fold every record of the folders, one after the other."""
    found = Journalled()
    for folder in folders:
        for record in read_records(folder):
            found.apply(record.parsed())
    return found


def _order(found: Journalled) -> list[str]:
    """Frames of one incarnation come in the order of their numbers, none left out."""
    problems, following = list[str](), dict[tuple[str, int], int]()
    for (sampler, incarnation, sequence), _ in found.frames:
        if sequence < following.get((sampler, incarnation), 0):
            problems.append(f"frame {sequence} of {sampler}.{incarnation} comes after a later one")
        following[sampler, incarnation] = sequence + 1
    spent = {key for key, _ in found.frames} | set(found.refused)
    for (sampler, incarnation), until in following.items():
        gaps = [number for number in range(until) if (sampler, incarnation, number) not in spent]
        problems += [f"frames {gaps} of {sampler}.{incarnation} were passed over"] if gaps else []
    return problems


def _states(found: Journalled, state: State) -> list[str]:
    """What the buffer says became of the groups, beside what the journal says."""
    counts = Counter[str]()
    for (_, _, name), row in state.rows().items():
        counts[name.partition(":")[0]] += row.groups
    trained = {group for groups in found.trained.values() for group in groups}
    problems = []
    if counts["produced"] != len(found.taken):
        problems.append(f"{len(found.taken)} groups were accepted, the state says {counts['produced']}")
    if counts["trained"] != len(trained):
        problems.append(f"{len(trained)} groups were trained, the state says {counts['trained']}")
    somewhere = counts["trained"] + counts["buffered"] + counts["leased"] + counts["dropped"]
    if somewhere != len(found.taken):
        problems.append(f"{len(found.taken)} groups were accepted, {somewhere} are somewhere")
    return problems


def _twice(what: str, keys: Iterable[object]) -> list[str]:
    return [f"{what} {key} is there {count} times" for key, count in Counter(keys).items() if count > 1]
