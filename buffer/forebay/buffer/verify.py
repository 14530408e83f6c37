"""Check a run's buffer folder from the bytes up, beside a running buffer or without one; changes nothing.

Segment files record by record, the fold of the state, the conservation law, the payloads that may still be leased
against their frames' checksums, the snapshots, and the weight store's chunks against their digests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from forebay.buffer.conservation import imbalances, ledger_response
from forebay.buffer.errors import JournalDamaged
from forebay.buffer.ledger import State
from forebay.buffer.records import SEGMENT_HEADER, parse_segment_header, segment_path
from forebay.buffer.recovery import recover
from forebay.buffer.segment_walk import Walked, segment_files, walk
from forebay.buffer.snapshot_check import check_snapshots
from forebay.buffer.weight_check import check_weights, place_of
from forebay.errors import UsageError
from forebay.wire.frame_header import checksum

RESTORE = "restore this file from a copy; without one, start a new run from the learner's last checkpoint"


@dataclass(slots=True)
class _Journal:
    """What the segments hold.

    `unusable`: LSN to what is wrong with the payloads that are not what was written; all is well with most of them,
    because nobody needs them any more. `gap`: file, offset and LSN from which on records are missing, until the next
    segment says where they go on.
    """

    next_lsn: int | None = None
    whole: int = 0  #: payloads
    released: int = 0  #: payloads that are zeros
    partial: int = 0  #: payloads that are neither whole nor zeros
    unusable: dict[int, str] = field(default_factory=dict)
    torn: str = ""
    gap: tuple[Path, int, int] | None = None


class Verification:
    """One check of one folder: `run` it, then `problems` has what is wrong, each with file, place and remedy."""

    def __init__(self, home: Path, tell: Callable[[str], None]) -> None:
        """`home` is the run folder; `tell` gets one line a segment and one for each other thing checked."""
        self._folder, self._tell = home / "buffer", tell
        self._journal = _Journal()
        self.problems: list[str] = []

    def run(self) -> bool:
        """Check everything; whether all is whole. Raises UsageError when there is no journal."""
        files = segment_files(self._folder / "journal")
        if not files:
            raise UsageError(f"{self._folder / 'journal'}: no journal here; expected the folder of a run")
        self._numbers(files)
        for path in files:
            self._segment(path, last=path == files[-1])
        self._close_gap(None)
        if self._journal.torn:
            self._tell(self._journal.torn)
        state = self._fold()
        self._snapshots()
        self._weights(state)
        return not self.problems

    # --- segments

    def _numbers(self, files: list[Path]) -> None:
        present = {int(path.stem) for path in files}
        for number in sorted(set(range(min(present), max(present))) - present):
            self._problem(f"{files[0].parent}: segment {number:08d} is missing: put it back, or {RESTORE}")

    def _segment(self, path: Path, *, last: bool) -> None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return self._tell(f"{path.name}: removed by the running buffer meanwhile")
        head = parse_segment_header(data)
        if head is None:
            return self._headless(path, data, last=last)
        first_lsn, salt = head
        if self._journal.gap is not None:
            self._close_gap(first_lsn)
        elif self._journal.next_lsn not in (None, first_lsn):
            self._problem(f"{path}: begins with LSN {first_lsn}, expected {self._journal.next_lsn}: {RESTORE}")
        self._records(path, data, salt, first_lsn, last=last)
        return None

    def _headless(self, path: Path, data: bytes, *, last: bool) -> None:
        if last and len(data) <= SEGMENT_HEADER.size:
            self._torn(path, 0, len(data))
        elif self._journal.gap is None:
            self._journal.gap = (path, 0, self._journal.next_lsn or 1)

    def _records(self, path: Path, data: bytes, salt: bytes, first_lsn: int, *, last: bool) -> None:
        count, before, lsn = 0, len(self.problems), first_lsn
        whole, released, partial = self._journal.whole, self._journal.released, self._journal.partial
        for item in walk(data, salt, first_lsn, sealed=not last):
            if isinstance(item, Walked):
                count, lsn = count + 1, item.lsn + 1
                self._count_payload(path, item)
            elif last and not item.acknowledged:
                self._torn(path, item.offset, len(data) - item.offset)
                break
            elif item.next_lsn is None:
                self._journal.gap = (path, item.offset, item.lsn)
            else:
                self._lost(path, item.offset, item.lsn, item.next_lsn)
        self._journal.next_lsn = lsn
        damaged = len(self.problems) > before or self._journal.gap is not None
        self._tell(
            f"{path.name}: LSN {first_lsn} to {lsn - 1}, {count} records, {len(data)} bytes; payloads: "
            f"{self._journal.whole - whole} whole, {self._journal.released - released} released"
            f"{_partly(self._journal.partial - partial)}; {'DAMAGED' if damaged else 'whole'}"
        )

    def _close_gap(self, next_lsn: int | None) -> None:
        """The records that were missing go on with `next_lsn`, or never."""
        if self._journal.gap is not None:
            path, offset, first = self._journal.gap
            self._journal.gap = None
            self._lost(path, offset, first, next_lsn)

    def _count_payload(self, path: Path, record: Walked) -> None:
        place = f"{path}: the payload of LSN {record.lsn} at {record.offset}"
        if record.intact and not record.payload:
            return
        if record.intact:
            self._journal.whole += 1
            if record.parsed().appended.header.payload_xxh3 != checksum(record.payload):
                self._journal.unusable[record.lsn] = f"{place} differs from its frame's checksum"
        elif record.payload.strip(b"\0"):
            self._journal.partial += 1
            self._journal.unusable[record.lsn] = f"{place} is neither what was written nor zeros, but still needed"
        else:
            self._journal.released += 1
            self._journal.unusable[record.lsn] = f"{place} is zeros, but still needed"

    # --- what the records add up to

    def _fold(self) -> State | None:
        if self.problems:
            self._tell("state: not folded, because records are lost")
            return None
        try:
            state = recover(self._folder / "journal", repair=False).state
        except (JournalDamaged, KeyError, ValueError) as error:
            self._problem(f"{error}" if isinstance(error, JournalDamaged) else f"the records do not add up: {error!r}")
            return None
        self._tell(
            f"state: step {state.committed} committed, checkpoint {state.checkpoint}, final {state.final}; "
            f"{len(state.buffered)} groups buffered, {len(state.leased)} leased, in {len(state.frames)} live frames"
        )
        self._live_frames(state)
        self._conserved(state)
        return state

    def _live_frames(self, state: State) -> None:
        """What may still be leased must be there: a snapshot vouches for older segments that the fold did not read."""
        for lsn in sorted(self._journal.unusable.keys() & state.frames.keys()):
            self._problem(f"{self._journal.unusable[lsn]}: {RESTORE}")
        segments = {entry.position.segment for entry in state.frames.values()}
        for segment in sorted(segments):
            path = segment_path(self._folder / "journal", segment)
            if not path.exists():
                self._problem(f"{path}: missing, but a snapshot says that frames in it are needed: put it back")

    def _snapshots(self) -> None:
        for problem in check_snapshots(self._folder / "journal", self._tell):
            self._problem(problem)

    def _conserved(self, state: State) -> None:
        wrong = imbalances(ledger_response(state))
        for line in wrong:
            self._problem(
                f"conservation: {line}: groups were lost or counted twice, a bug: report it with this journal"
            )
        if not wrong:
            self._tell("conservation: produced = trained + buffered + leased + dropped")

    def _weights(self, state: State | None) -> None:
        newest = state.newest if state is not None else None
        digest = state.published[newest].digest if state is not None and newest is not None else b""
        found = check_weights(place_of(self._folder.parent), newest, digest)
        self.problems.extend(found.problems)
        for problem in found.problems:
            self._tell(f"DAMAGED: {problem}")
        state_of = "some are damaged" if found.problems else "all match their digests"
        self._tell(f"weights: {found.versions} versions, {found.chunks} chunks, {found.bytes} bytes; {state_of}")

    # --- saying

    def _torn(self, path: Path, offset: int, size: int) -> None:
        self._journal.torn = (
            f"torn tail: {size} bytes at offset {offset} of {path.name} are half a record that was never acknowledged: "
            "fine, the buffer cuts it off when it starts (or is writing it just now)"
        )

    def _lost(self, path: Path, offset: int, first: int, next_lsn: int | None) -> None:
        if next_lsn == first:
            return self._problem(
                f"{path}: bytes that are no record at offset {offset}; nothing is lost: truncate -s {offset} {path}"
            )
        until = " and on" if next_lsn is None else f" to {next_lsn - 1}"
        return self._problem(f"{path}: damaged at offset {offset}: LSN {first}{until} lost: {RESTORE}")

    def _problem(self, text: str) -> None:
        self.problems.append(text)
        self._tell(f"DAMAGED: {text}")


def _partly(count: int) -> str:
    """Payloads that a crash left half given back look like damage; only a replay would ask for them."""
    return f", {count} neither (half released by a crash, or damaged and needed by a replay alone)" if count else ""
