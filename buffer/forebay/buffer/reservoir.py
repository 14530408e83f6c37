"""The live buffer: state, journal and members together, and the one way to change them.

Everything here runs on one event loop. A change is journalled and applied at once, in that order; an answer that
depends on it is given only after `durable()`, so nobody is told what a crash could take back.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from forebay.buffer.admission import last_step
from forebay.buffer.disk import Disk
from forebay.buffer.errors import JournalFailed, MemberFenced, MemberUnknown
from forebay.buffer.evals import EvalDesk, final_missing
from forebay.buffer.journal import Journal
from forebay.buffer.ledger import MemberKey, MemberRecord, State, member_key
from forebay.buffer.members import Members
from forebay.buffer.progress import Progress
from forebay.buffer.records import Position, Tail, segment_path
from forebay.buffer.recovery import recover
from forebay.buffer.retention import Retention
from forebay.buffer.rules import Rules
from forebay.buffer.selectors import order_of
from forebay.buffer.signals import Signal
from forebay.buffer.weight_place import place_at, url_of
from forebay.buffer.weight_store import WeightStore
from forebay.config.identity import differences, run_json
from forebay.config.models import RunFile
from forebay.errors import UsageError
from forebay.wire.v1 import common_pb2, experience_pb2, journal_pb2

log = logging.getLogger(__name__)

#: Room that appends leave on the disk for the small records that must still get through.
RESERVE_BYTES = 64 << 20
#: Times of settled permits that are kept before they are cleared away.
_SETTLED_KEPT = 4096


class Reservoir:
    """The buffer of one run. Make it with `open_reservoir`."""

    def __init__(
        self,
        run: RunFile,
        state: State,
        journal: Callable[[Reservoir], Journal],
        store: WeightStore,
        *,
        disk: Disk,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.run, self.rules, self.state, self.store = run, Rules.of(run), state, store
        state.buffered.order_by(order_of(self.rules))
        self.members = Members(run.buffer.member_timeout_s, clock)
        kept = run.buffer
        self._granted_at = dict.fromkeys(state.permits, clock())  # the earliest first; after a restart all as of now
        self.retention = Retention(int(kept.retain_gb * 1e9), kept.retain_hours * 3600, clock)
        self.evals = EvalDesk(is_live=self.members.is_live)
        self.permits_changed, self.groups_changed, self.versions_changed = Signal(), Signal(), Signal()
        self.sealed = Signal()  #: a segment of the journal is complete
        self.clock, self.wall, self._disk = clock, wall, disk
        self.draining = False
        self.lease_waits: tuple[int, str, float] | None = None  #: step, cause, since
        self.failure: asyncio.Future[JournalFailed] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self.streams = 0  #: append streams that are open
        self.journal = journal(self)
        self.progress = Progress(self.journal)
        for key, record in state.members.items():
            if not record.left:
                self.members.joined(key, record.incarnation)

    # --- changing

    def record(self, event: journal_pb2.Event, payload: bytes = b"") -> Position:
        """Journal an event and apply it. Raises JournalFailed."""
        event.at_unix_s = self.wall()
        position = self.journal.append(event, payload, self.state.apply)
        self._release()
        return position

    async def durable(self) -> None:
        """Return when everything so far is on the disk. Raises JournalFailed if it never will be."""
        await self.progress.wait(self.journal.last_lsn, experience_pb2.DURABLE)

    def changed(self) -> None:
        """Wake all who wait for permits, groups or versions."""
        for signal in (self.permits_changed, self.groups_changed, self.versions_changed):
            signal.notify()

    async def failed(self) -> JournalFailed:
        """Wait for the journal to fail."""
        return await asyncio.shield(self.failure)

    def hang_up(self) -> None:
        """The service stops: nobody waits any longer."""
        for signal in (self.permits_changed, self.groups_changed, self.versions_changed):
            signal.close()

    # --- asking

    def speaker(self, member: common_pb2.Member, role: int) -> tuple[MemberKey, MemberRecord]:
        """The member that speaks, who thereby is alive. Raises MemberUnknown, MemberFenced."""
        key = member_key(role, member.id)
        record = self.state.members.get(key)
        if record is None or member.role != role or member.incarnation > record.incarnation:
            raise MemberUnknown(f"{member.id} never joined this buffer: its run folder is another one; start anew")
        if member.incarnation < record.incarnation or record.id != member.id:
            raise MemberFenced(
                f"{member.id} is fenced: incarnation {record.incarnation} of {record.id} took over from "
                f"{member.incarnation}"
            )
        self.members.seen(key)
        return key, record

    @property
    def finished(self) -> bool:
        """Whether every step is saved and the final evaluation reported."""
        return self.state.checkpoint >= last_step(self.state, self.rules) and not final_missing(self.state, self.rules)

    @property
    def disk_bytes(self) -> int:
        """What journal and weights take on the disk."""
        return self.journal.disk_bytes + self.store.disk_bytes

    def no_room(self) -> str:
        """Why a frame cannot be taken now; empty when it can. What is only kept for replay goes first."""
        why = self._why_full()
        if why and self.retention.bytes:
            self._give_back(self.retention.due(make_room=True))
        return why

    def _why_full(self) -> str:
        limit = self.run.buffer.disk_gb * 1e9
        if self.journal.full or self._disk.free_bytes(self.store.folder) < RESERVE_BYTES:
            return "the buffer's disk is full"
        if self.state.buffered.trajectories >= self.run.buffer.max_trajectories:
            return f"[buffer] max_trajectories = {self.run.buffer.max_trajectories} is reached: the learner is slower"
        if self.disk_bytes > limit:
            return f"[buffer] disk_gb = {self.run.buffer.disk_gb:g} is reached"
        if not self.memory_left_bytes:
            return f"[buffer] memory_mb = {self.run.buffer.memory_mb} is reached: the disk is slower than the samplers"
        return ""

    @property
    def memory_left_bytes(self) -> int:
        """Room for frames that wait for the disk."""
        return max(0, (self.run.buffer.memory_mb << 20) - self.journal.pending_bytes)

    # --- the journal's side

    def on_progress(self) -> None:
        """The journal's writer thread has got further."""
        self._on_loop(self.progress.advance)

    def on_sealed(self) -> None:
        """The journal's writer thread has begun a new segment."""
        self._on_loop(self.sealed.notify)

    def on_failure(self, error: JournalFailed) -> None:
        """The journal's writer thread says that it is over."""
        self._on_loop(lambda: self._fail(error))

    def close(self) -> None:
        """Write everything out and stop. Raises JournalFailed."""
        self.journal.close()

    def _on_loop(self, callback: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _fail(self, error: JournalFailed) -> None:
        if not self.failure.done():
            self.failure.set_result(error)
        self.progress.fail(error)

    def permits_granted(self, group_ids: Iterable[int]) -> None:
        """From now on these may become overdue."""
        now = self.clock()
        for group_id in group_ids:
            self._granted_at.pop(group_id, None)
            self._granted_at[group_id] = now

    def overdue_permits(self) -> list[int]:
        """Groups whose permits are outstanding for longer than they may be; each is told once."""
        if len(self._granted_at) > 2 * len(self.state.permits) + _SETTLED_KEPT:
            self._granted_at = {group: at for group, at in self._granted_at.items() if group in self.state.permits}
        due = self.clock() - self.run.buffer.permit_timeout_s
        passed = list(itertools.takewhile(lambda group: self._granted_at[group] < due, self._granted_at))
        for group_id in passed:
            del self._granted_at[group_id]
        return [group_id for group_id in passed if group_id in self.state.permits]

    def housekeep(self) -> None:
        """What is due with time: payloads that were kept long enough."""
        self._give_back(self.retention.due(make_room=False))

    def _release(self) -> None:
        released, self.state.released = self.state.released, []
        self.retention.keep(released)
        self.housekeep()

    def _give_back(self, positions: list[Position]) -> None:
        if positions:
            self._loop.run_in_executor(None, _release, self.journal, positions)


def _release(journal: Journal, positions: list[Position]) -> None:
    try:
        journal.release(positions)
    except (JournalFailed, OSError) as error:
        log.warning("payloads that nobody needs stay on the disk: %s", error)


def open_reservoir(
    run: RunFile,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    disk: Disk | None = None,
    segment_bytes: int | None = None,
) -> Reservoir:
    """Recover the run's buffer from its folder, or found it. Needs a running event loop.

    Raises JournalDamaged, and UsageError when the folder belongs to a run with other settings.
    """
    disk = disk or Disk()
    journal_folder, weights_folder = _folders(run, disk)
    found = recover(journal_folder, repair=True)
    state = found.state
    _check_same_run(run, state)
    _settle(disk, journal_folder, found.tail)
    place = place_at(url_of(run.publish.store, run.run.name), weights_folder, disk)
    store = WeightStore(weights_folder, place=place, keep_anchors=run.buffer.keep_anchors, clock=clock)

    def journal(reservoir: Reservoir) -> Journal:
        return Journal(
            journal_folder,
            found.tail,
            on_progress=reservoir.on_progress,
            on_failure=reservoir.on_failure,
            on_sealed=reservoir.on_sealed,
            disk=disk,
            segment_bytes=segment_bytes or run.buffer.segment_mb << 20,
        )

    reservoir = Reservoir(run, state, journal, store, disk=disk, clock=clock, wall=wall)
    reservoir.retention.keep(found.released)
    reservoir.housekeep()
    if not state.run_json:
        reservoir.record(journal_pb2.Event(run_opened=journal_pb2.RunOpened(run_json=run_json(run))))
    return reservoir


def _folders(run: RunFile, disk: Disk) -> tuple[Path, Path]:
    """Where the journal and the weights are, made if needed, without what a crash left unfinished."""
    journal_folder, weights_folder = run.run.home / "buffer" / "journal", run.run.home / "buffer" / "weights"
    for folder in (journal_folder, weights_folder):
        folder.mkdir(parents=True, exist_ok=True)
        disk.sync_parents(folder, levels=3)  # up to the one that holds the run folder
    for unfinished in journal_folder.glob("*.tmp"):
        unfinished.unlink()
    return journal_folder, weights_folder


def _settle(disk: Disk, journal_folder: Path, tail: Tail) -> None:
    """What was found counts from now on, though a killed process may have left it unsynced. Raises OSError."""
    if tail.salt:
        fd = os.open(segment_path(journal_folder, tail.segment), os.O_RDONLY)
        try:
            disk.sync(fd)
        finally:
            os.close(fd)
    disk.sync_folder(journal_folder)


def _check_same_run(run: RunFile, state: State) -> None:
    diff = differences(state.run_json, run_json(run)) if state.run_json else []
    if diff:
        raise UsageError(
            f"{run.run.home} holds a run with other settings; rename or move this one, or set back:\n"
            + "\n".join(f"  {line}" for line in diff)
        )
