"""Check snapshots on disk: each by itself, and against the records that it stands for, where these are still there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forebay.buffer import snapshots
from forebay.buffer.errors import JournalDamaged
from forebay.buffer.records import segment_path
from forebay.buffer.state_snapshot import Snapshot, from_message

REMEDY = "delete it, the buffer then starts from the one before, or from the journal"


def check_snapshots(folder: Path, tell: Callable[[str], None]) -> list[str]:
    """What is wrong with the snapshots of a journal folder, a sentence each; `tell` gets a line for each whole one."""
    problems: list[str] = []
    base: Snapshot | None = None
    for number in snapshots.numbers(folder):
        path = snapshots.snapshot_path(folder, number)
        try:
            snapshot = snapshots.read(path)
            compared = _agrees(folder, base, snapshot)
        except FileNotFoundError:
            tell(f"{path.name}: removed by the running buffer meanwhile")
            continue
        except ValueError as error:
            problems.append(f"{error}: {REMEDY}")
            continue
        if compared is False:
            problems.append(f"{path}: differs from what the records before it add up to: {REMEDY}")
        else:
            how = "as the records say" if compared else "whole"
            tell(f"{path.name}: the state before LSN {snapshot.next_lsn}; {how}")
            base = snapshot
    return problems


def _agrees(folder: Path, base: Snapshot | None, snapshot: Snapshot) -> bool | None:
    """Whether the records from `base` on lead to `snapshot`; None when they are not all there."""
    if base is None and not segment_path(folder, 1).exists():
        return None
    try:
        state, next_lsn = snapshots.fold(folder, base, snapshot.segment)
    except (JournalDamaged, FileNotFoundError):
        return None  # damage of records has been told; or a running buffer has just deleted them
    return next_lsn == snapshot.next_lsn and state == from_message(snapshot)
