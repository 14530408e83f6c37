"""The buffer's whole state as a pure fold of its journal: no clock, no files, no decisions.

The live service and recovery both go through `State.apply`, so what a restart finds is what was there.
Decisions are made elsewhere (`admission`, `batching`) from a State, as events that are journalled and then applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from forebay.buffer.errors import JournalDamaged
from forebay.buffer.records import Position
from forebay.buffer.stock import Stock
from forebay.buffer.tally import Counts, RowKey, Tally
from forebay.wire.v1 import common_pb2, control_pb2, experience_pb2, journal_pb2
from forebay.wire.version import Version

#: Answers remembered per producer, so that a resent frame is recognised; above any client's window.
REMEMBERED_FRAMES = 1024

#: (role, id); all learners share one, because there is one.
MemberKey = tuple[int, str]


def member_key(role: int, member_id: str) -> MemberKey:
    """Under which the member is known."""
    return (role, "" if role == common_pb2.ROLE_LEARNER else member_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group whose payload the journal still holds."""

    group_id: int
    lsn: int
    index: int
    fleet: str
    oldest: Version
    step: int  #: no token of the group is from an earlier step's weights
    arrival_step: int  #: the newest committed step when it came
    priority: float
    counts: Counts

    @property
    def arrival(self) -> tuple[int, int]:
        """Orders groups by when they came."""
        return (self.lsn, self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outstanding:
    """A permit in the hands of a sampler."""

    attempt: int
    holder: MemberKey
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What step `step` trains, fixed when it was first leased.

    `tries` counts the learner incarnations that leased it since it was last committed.
    """

    attempt: int
    group_ids: tuple[int, ...]
    incarnation: int
    tries: int


@dataclass(slots=True)
class Sampled:
    """What became of a group in batches: in how many it was, in how many that are not final, whether one was final."""

    times: int = 0
    live: int = 0
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A published version of the weights."""

    digest: bytes
    payload_bytes: int
    model_bytes: int
    void: bool = False


@dataclass(slots=True)
class MemberRecord:
    """What the journal knows of a member. `recent` maps sequence numbers to a payload's xxh3 or a refusal's text."""

    id: str
    incarnation: int
    fleet: str
    region: str
    left: bool = False
    next_sequence: int = 0
    recent: dict[int, int | str] = field(default_factory=dict)
    request: int = 0
    request_permits: tuple[tuple[int, int], ...] = ()
    groups: int = 0
    tokens: int = 0


@dataclass(slots=True)
class FrameEntry:
    """Where a frame lies and how many of its groups may still be leased."""

    position: Position
    live: int


@dataclass(slots=True)
class State:
    """Everything the buffer knows that must survive it."""

    run_json: str = ""
    members: dict[MemberKey, MemberRecord] = field(default_factory=dict)
    next_group: int = 0
    given_back: int = 0
    permits: dict[int, Outstanding] = field(default_factory=dict)
    again: dict[int, int] = field(default_factory=dict)  #: group id → attempts so far, to be granted again
    groups: dict[int, Group] = field(default_factory=dict)
    buffered: Stock = field(default_factory=Stock)
    sampled: dict[int, Sampled] = field(default_factory=dict)
    frames: dict[int, FrameEntry] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    committed: int = 0
    checkpoint: int = 0
    final: int = 0
    checkpoints: list[int] = field(default_factory=list)
    published: dict[Version, Publication] = field(default_factory=dict)
    tallies: dict[tuple[str, Version], Tally] = field(default_factory=dict)
    refunds: dict[tuple[str, str], int] = field(default_factory=dict)  #: (fleet, reason) → groups never produced
    steps: dict[int, control_pb2.StepRecord] = field(default_factory=dict)
    evals: dict[Version, control_pb2.EvalResult] = field(default_factory=dict)
    paused: str = ""
    released: list[Position] = field(default_factory=list, compare=False)  #: payloads nobody needs any more

    def apply(self, event: journal_pb2.Event, position: Position) -> None:
        """Advance by one event. Raises JournalDamaged when it cannot follow from what was before."""
        match event.WhichOneof("kind"):
            case None:
                pass
            case "run_opened":
                self.run_json = event.run_opened.run_json
            case "joined":
                self._joined(event.joined)
            case "left":
                self.members[_key(event.left.member)].left = True
            case "granted":
                self._granted(event.granted)
            case "expired":
                self._expired(event.expired.permits)
            case "appended":
                self._appended(event.appended, position)
            case "refused":
                self._refused(event.refused)
            case "refunded":
                self._refunded(event.refunded)
            case "dropped":
                self._dropped(event.dropped)
            case "leased":
                self._leased(event.leased, position)
            case "committed":
                self._committed(event.committed, event.at_unix_s)
            case "rejected":
                self._rejected(event.rejected)
            case "rewound":
                self._rewound(event.rewound)
            case "published":
                self._published(event.published)
            case "evaluated":
                self.evals[Version.from_proto(event.evaluated.result.version)] = event.evaluated.result
            case "paused":
                self.paused = event.paused.reason or "by hand"
            case "resumed":
                self.paused = ""

    # --- what can be asked

    @property
    def newest(self) -> Version | None:
        """The newest version of the current lineage; None before the first publication."""
        return max((version for version, entry in self.published.items() if not entry.void), default=None)

    @property
    def learner(self) -> MemberRecord | None:
        """The learner that joined last."""
        return self.members.get((common_pb2.ROLE_LEARNER, ""))

    @property
    def started(self) -> int:
        """Groups started whose capacity was not given back."""
        return self.next_group - self.given_back

    @property
    def leased(self) -> list[int]:
        """Ids of the groups that belong to a batch not committed, and to no earlier one."""
        return self._first_in(lambda step: step > self.committed)

    def times_sampled(self, group_id: int) -> int:
        """In how many batches the group was."""
        return self.sampled[group_id].times if group_id in self.sampled else 0

    def is_done(self, group_id: int) -> bool:
        """Whether the group was granted once and is no longer awaited."""
        return group_id < self.next_group and group_id not in self.permits and group_id not in self.again

    def rows(self) -> dict[RowKey, Counts]:
        """The ledger: counts by fleet, oldest version and state."""
        rows: dict[RowKey, Counts] = {}
        for (fleet, version), tally in self.tallies.items():
            rows[fleet, version, "produced"] = tally.produced
            rows[fleet, version, "trained"] = tally.final
            for reason, counts in tally.dropped.items():
                rows[fleet, version, f"dropped:{reason}"] = counts
        for (fleet, version), counts in self.buffered.unused.items():
            rows[fleet, version, "buffered"] = counts
        self._add(rows, "leased", self.leased)
        self._add(rows, "trained", self._first_in(lambda step: step <= self.committed))
        return rows

    def _first_in(self, wanted: Callable[[int], bool]) -> list[int]:
        """Ids of the groups whose first batch is one of the wanted steps'; without those that are final."""
        seen: set[int] = set()
        first: list[int] = []
        for step in sorted(self.batches):
            new = [group for group in self.batches[step].group_ids if group not in seen]
            seen.update(new)
            if wanted(step):
                first += [group for group in new if not self.sampled[group].final]
        return first

    def _add(self, rows: dict[RowKey, Counts], state: str, group_ids: Iterable[int]) -> None:
        for group in map(self.groups.__getitem__, group_ids):
            key = (group.fleet, group.oldest, state)
            rows[key] = rows.get(key, Counts()) + group.counts

    # --- members and permits

    def _joined(self, joined: journal_pb2.Joined) -> None:
        key, before = _key(joined.member), self.members.get(_key(joined.member))
        self.members[key] = MemberRecord(
            joined.member.id,
            joined.member.incarnation,
            joined.fleet,
            joined.region,
            groups=before.groups if before else 0,
            tokens=before.tokens if before else 0,
        )

    def _granted(self, granted: journal_pb2.Granted) -> None:
        key = _key(granted.member)
        for permit in granted.permits:
            self.again.pop(permit.group_id, None)
            self.permits[permit.group_id] = Outstanding(
                attempt=permit.attempt, holder=key, incarnation=granted.member.incarnation
            )
            self.next_group = max(self.next_group, permit.group_id + 1)
        member = self.members[key]
        member.request = granted.request
        member.request_permits = tuple((permit.group_id, permit.attempt) for permit in granted.permits)

    def _expired(self, permits: Iterable[experience_pb2.Permit]) -> None:
        for permit in permits:
            if self.permits.pop(permit.group_id, None) is not None:
                self.again[permit.group_id] = permit.attempt

    def _refunded(self, refunded: journal_pb2.Refunded) -> None:
        fleet = self.members[_key(refunded.member)].fleet
        for refund in refunded.refunds:
            self.permits.pop(refund.group_id)
            if refund.again:
                self.again[refund.group_id] = refund.attempt
            elif refund.trajectories:
                self._filtered(fleet, refund)
            else:
                key = (fleet, refund.reason)
                self.refunds[key] = self.refunds.get(key, 0) + 1
                self.given_back += 1

    def _filtered(self, fleet: str, refund: experience_pb2.Refund) -> None:
        """A group that was produced and is not worth training."""
        counts = Counts(1, refund.trajectories, refund.tokens)
        tally = self.tallies.setdefault((fleet, Version.from_proto(refund.oldest)), Tally())
        tally.produced += counts
        tally.dropped[refund.reason] = tally.dropped.get(refund.reason, Counts()) + counts
        self.given_back += 1

    # --- experience in

    def _appended(self, appended: journal_pb2.Appended, position: Position) -> None:
        header, superseded = appended.header, set(appended.superseded)
        member = self.members[member_key(common_pb2.ROLE_SAMPLER, header.sampler)]
        self._remember(member, header.sequence, header.payload_xxh3)
        taken = 0
        for index, group in enumerate(header.groups):
            if group.group_id not in superseded:
                self._take(group, member, position, index)
                taken += 1
        if taken:
            self.frames[position.lsn] = FrameEntry(position=position, live=taken)

    def _take(self, header: experience_pb2.GroupHeader, member: MemberRecord, position: Position, index: int) -> None:
        if self.permits.pop(header.group_id, None) is None and self.again.pop(header.group_id, None) is None:
            raise JournalDamaged(f"LSN {position.lsn}: group {header.group_id} arrives, but was not outstanding")
        group = Group(
            group_id=header.group_id,
            lsn=position.lsn,
            index=index,
            fleet=member.fleet,
            oldest=Version.from_proto(header.oldest),
            step=self._lowest_step(Version.from_proto(header.oldest), Version.from_proto(header.newest)),
            arrival_step=self.committed,
            priority=header.priority,
            counts=Counts(1, header.members, header.generated_tokens),
        )
        self.groups[group.group_id] = group
        self.buffered.add(group)
        tally = self.tallies.setdefault((group.fleet, group.oldest), Tally())
        tally.produced += group.counts
        member.groups += 1
        member.tokens += group.counts.tokens

    def _lowest_step(self, oldest: Version, newest: Version) -> int:
        """Between two incarnations a resumed learner may have gone back to a lower step than either."""
        between = [v.step for v in self.published if oldest.incarnation < v.incarnation <= newest.incarnation]
        return min(oldest.step, newest.step, *between)

    def _refused(self, refused: journal_pb2.Refused) -> None:
        self._remember(self.members[_key(refused.member)], refused.sequence, refused.detail)

    def _remember(self, member: MemberRecord, sequence: int, answer: int | str) -> None:
        member.next_sequence = sequence + 1
        member.recent[sequence] = answer
        member.recent.pop(sequence - REMEMBERED_FRAMES, None)

    def _dropped(self, dropped: journal_pb2.Dropped) -> None:
        for group_id in dropped.group_ids:
            self.buffered.remove(group_id)
            if group_id not in self.sampled:
                self._drop(self.groups[group_id], dropped.reason)
            else:
                self._forget_if_done(group_id)

    def _drop(self, group: Group, reason: str) -> None:
        drops = self.tallies[group.fleet, group.oldest].dropped
        drops[reason] = drops.get(reason, Counts()) + group.counts
        self.given_back += 1
        self._forget(group)

    def _forget(self, group: Group) -> None:
        del self.groups[group.group_id]
        self.sampled.pop(group.group_id, None)
        frame = self.frames[group.lsn]
        frame.live -= 1
        if not frame.live:
            del self.frames[group.lsn]
            self.released.append(frame.position)

    def _forget_if_done(self, group_id: int) -> None:
        """A group that was trained is kept while a batch that may be replayed, or a later one, can have it."""
        if group_id not in self.buffered and not self.sampled[group_id].live:
            self._forget(self.groups[group_id])

    # --- batches out

    def _leased(self, leased: journal_pb2.Leased, position: Position) -> None:
        group_ids, incarnation = tuple(leased.group_ids), leased.member.incarnation
        known = self.batches.get(leased.step)
        if known is None:
            self._take_out(group_ids, set(leased.reusable))
        elif known.group_ids != group_ids:
            raise JournalDamaged(f"LSN {position.lsn}: step {leased.step} is leased with other groups than before")
        tries = known.tries + (known.incarnation != incarnation) if known else 1
        self.batches[leased.step] = Batch(
            attempt=leased.attempt, group_ids=group_ids, incarnation=incarnation, tries=tries
        )

    def _take_out(self, group_ids: Iterable[int], reusable: set[int]) -> None:
        for group_id in group_ids:
            sampled = self.sampled.setdefault(group_id, Sampled())
            sampled.times, sampled.live = sampled.times + 1, sampled.live + 1
            if group_id in reusable:
                self.buffered.mark_used(group_id)
            else:
                self.buffered.remove(group_id)

    def _rejected(self, rejected: journal_pb2.Rejected) -> None:
        batch, refused = self.batches.pop(rejected.step), set(rejected.group_ids)
        for group_id in batch.group_ids:
            sampled = self.sampled[group_id]
            sampled.times, sampled.live = sampled.times - 1, sampled.live - 1
            used = sampled.times > 0
            if group_id in self.buffered:
                self.buffered.remove(group_id)
            if group_id in refused and not used:
                self._drop(self.groups[group_id], rejected.reason)
            elif group_id in refused:
                self._forget_if_done(group_id)
            else:
                self.buffered.add(self.groups[group_id], used=used)
                if not used:
                    del self.sampled[group_id]

    def _committed(self, committed: journal_pb2.Committed, at_unix_s: float) -> None:
        if committed.step > self.committed:
            self.committed = committed.step
            if committed.step in self.batches:
                self.batches[committed.step] = replace(self.batches[committed.step], tries=0, incarnation=0)
            self.steps[committed.step] = control_pb2.StepRecord(
                step=committed.step, at_unix_s=at_unix_s, metrics_json=committed.metrics_json
            )
        if committed.checkpoint_step > self.checkpoint:
            self.checkpoint = committed.checkpoint_step
            self.checkpoints.append(committed.checkpoint_step)
        self._finalize(committed.final_step)

    def _finalize(self, step: int) -> None:
        for done in [done for done in self.batches if done <= step]:
            for group_id in self.batches.pop(done).group_ids:
                group, sampled = self.groups[group_id], self.sampled[group_id]
                if not sampled.final:
                    self.tallies[group.fleet, group.oldest].final += group.counts
                sampled.final, sampled.live = True, sampled.live - 1
                self._forget_if_done(group_id)
        self.final = max(self.final, step)
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint >= self.final]

    def _rewound(self, rewound: journal_pb2.Rewound) -> None:
        step = rewound.checkpoint_step
        self.committed = self.checkpoint = step
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint <= step]
        for later in [later for later in self.steps if later > step]:
            del self.steps[later]
        for version, entry in self.published.items():
            if version.step > step and version.incarnation < rewound.member.incarnation:
                self.published[version] = Publication(
                    digest=entry.digest, payload_bytes=entry.payload_bytes, model_bytes=entry.model_bytes, void=True
                )

    def _published(self, published: journal_pb2.Published) -> None:
        self.published[Version.from_proto(published.version)] = Publication(
            digest=published.digest, payload_bytes=published.payload_bytes, model_bytes=published.model_bytes
        )


def _key(member: common_pb2.Member) -> MemberKey:
    return member_key(member.role, member.id)
