"""A run's journal read back as Arrow or Parquet rows: one row a trajectory, with what became of it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.buffer.recording import Recording, as_ranges, in_words, taken
from forebay.buffer.segment_walk import Walked, read_records
from forebay.errors import UsageError
from forebay.wire.errors import FrameError
from forebay.wire.experience import decode_frame, to_record_batch
from forebay.wire.record_batch import SCHEMA as ROWS
from forebay.wire.trajectory import Trajectory
from forebay.wire.v1 import experience_pb2, journal_pb2

#: Rows of `to_record_batch`, and the step that had them first (null: none did) and what became of their group.
SCHEMA = pa.schema([*ROWS, pa.field("step", pa.uint32()), pa.field("state", pa.string())], metadata=ROWS.metadata)
#: Rows gather up to this size before they are written as one row group.
BATCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps `first` to `last`, both included; None: no bound."""

    first: int | None = None
    last: int | None = None

    @classmethod
    def parse(cls, text: str) -> Steps:
        """`3:7`, `3:`, `:7` or `5`. Raises UsageError."""
        found = re.fullmatch(r"(\d*)(:?)(\d*)", text)
        first, last = (int(part) if part else None for part in (found[1], found[3])) if found else (0, 0)
        last = last if found and found[2] else first
        if (first, last) == (None, None) or first == 0 or (last is not None and last < (first or 1)):
            raise UsageError(f"--steps {text}: expected A:B with 1 <= A <= B, for example 3:7, 3:, :7 or 5")
        return cls(first=first, last=last)

    def hold(self, steps: Sequence[int]) -> bool:
        """Whether one of `steps` is among them; a group that no step has leased is only when there is no bound."""
        if self.first is None and self.last is None:
            return True
        return any((self.first or 1) <= step and (self.last is None or step <= self.last) for step in steps)


@dataclass(slots=True)
class Export:
    """What was written and what could not be."""

    rows: int = 0
    groups: Counter[str] = field(default_factory=Counter)  #: by state
    released_frames: int = 0
    released_groups: list[int] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)  #: frames that do not decode, and why

    def in_words(self, recording: Recording) -> list[str]:
        """What is printed."""
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.groups.items())) or "none"
        lines = [f"{self.rows} trajectories of {self.groups.total()} groups: {states}"]
        if self.released_frames:
            steps = {step for group in self.released_groups for step in recording.steps.get(group, ())}
            lines.append(
                f"not written: {self.released_frames} frames with {len(self.released_groups)} groups whose payload was "
                f"released (steps {in_words(as_ranges(sorted(steps)))})"
            )
        if self.unreadable:
            lines.append(f"not readable: {len(self.unreadable)} frames; the first: {self.unreadable[0]}")
        return lines


def export(recording: Recording, target: Path, steps: Steps) -> Export:
    """Write the trajectories of `steps` to `target` (.parquet or .arrow), in the order in which their frames arrived.

    One segment and BATCH_BYTES of rows are in memory at a time; `target` appears when it is whole. Raises UsageError
    for other suffixes and places that cannot be written, JournalDamaged.
    """
    found = Export()
    with _written(target) as write:
        waiting: list[pa.RecordBatch] = []
        for record in read_records(recording.journal):
            waiting.extend(_rows(recording, record, steps, found))
            if sum(batch.nbytes for batch in waiting) >= BATCH_BYTES:
                write(waiting)
                waiting = []
        if waiting:
            write(waiting)
    return found


def _rows(recording: Recording, record: Walked, steps: Steps, found: Export) -> Iterator[pa.RecordBatch]:
    event = record.parsed()
    if event.WhichOneof("kind") != "appended":
        return
    wanted = [group for group in taken(event.appended) if steps.hold(recording.steps.get(group, ()))]
    if not wanted:
        return
    if not record.intact:
        found.released_frames += 1
        found.released_groups.extend(wanted)
        return
    try:
        trajectories = _decoded(event.appended, record.payload, set(wanted))
    except FrameError as error:
        found.unreadable.append(f"LSN {record.lsn}: {error}")
        return
    found.rows += len(trajectories)
    found.groups.update(map(recording.state_of, wanted))
    yield _with_fate(to_record_batch(trajectories, event.appended.header), trajectories, recording)


def _decoded(appended: journal_pb2.Appended, payload: bytes, wanted: set[int]) -> list[Trajectory]:
    frame = experience_pb2.Frame(header=appended.header, payload=payload)
    return [trajectory for trajectory in decode_frame(frame) if trajectory.group_id in wanted]


def _with_fate(batch: pa.RecordBatch, trajectories: Sequence[Trajectory], recording: Recording) -> pa.RecordBatch:
    steps = pa.array([recording.steps.get(member.group_id, [None])[0] for member in trajectories], pa.uint32())
    states = pa.array([recording.state_of(member.group_id) for member in trajectories], pa.string())
    return pa.RecordBatch.from_arrays([*batch.columns, steps, states], schema=SCHEMA)


@contextmanager
def _written(target: Path) -> Iterator[Callable[[list[pa.RecordBatch]], None]]:
    """Gives a function that writes batches; the file gets its name when the body ends well."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        writer = _writer(target, partial)
    except OSError as error:
        raise UsageError(f"{target}: cannot write there ({error.strerror or error})") from error
    try:
        with writer:
            yield lambda batches: writer.write_table(pa.Table.from_batches(batches).combine_chunks())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _writer(target: Path, partial: Path) -> Any:
    if target.suffix == ".parquet":
        return pq.ParquetWriter(partial, SCHEMA, compression="zstd")
    if target.suffix == ".arrow":
        return pa.ipc.new_file(partial, SCHEMA)
    raise UsageError(f"--to {target}: expected a name that ends in .parquet or .arrow")
