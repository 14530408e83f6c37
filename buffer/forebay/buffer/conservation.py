"""The conservation law, read from a live state or from a journal on disk, and whether it holds.

produced = trained + buffered + leased + dropped     per fleet and version, in groups, trajectories and tokens
started  = produced + refunded + outstanding         in groups
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from rich.table import Table

from forebay.buffer.ledger import State
from forebay.buffer.recovery import recover
from forebay.buffer.tally import Counts, ledger_rows
from forebay.errors import UsageError
from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version

Row = experience_pb2.LedgerRow


def ledger_response(state: State) -> experience_pb2.LedgerResponse:
    """The ledger of a state. Groups that were never produced are rows `refunded:<reason>` without a version."""
    refunds = [
        Row(fleet=fleet, state=f"refunded:{reason}", groups=groups)
        for (fleet, reason), groups in sorted(state.refunds.items())
    ]
    return experience_pb2.LedgerResponse(
        rows=[*ledger_rows(state.rows()), *refunds],
        permits_outstanding=len(state.permits) + len(state.again),
        groups_started=state.next_group,
        groups_refunded=sum(state.refunds.values()),
    )


def ledger_of(journal_folder: Path) -> experience_pb2.LedgerResponse:
    """The ledger of a journal on disk, of a stopped or running buffer; changes nothing there.

    Raises UsageError when there is no journal, JournalDamaged when it cannot be read.
    """
    if not any(journal_folder.glob("*.journal")):
        raise UsageError(f"{journal_folder}: there is no journal here: expected the folder of a run that was started")
    return ledger_response(recover(journal_folder, repair=False).state)


def imbalances(ledger: experience_pb2.LedgerResponse) -> list[str]:
    """One line for each place where the law does not hold."""
    produced, accounted = _sums(ledger.rows, _is_produced), _sums(ledger.rows, _is_accounted)
    wrong = [
        f"fleet {fleet}, version {version}: produced {produced.get((fleet, version), Counts())}, "
        f"accounted for {accounted.get((fleet, version), Counts())}"
        for fleet, version in sorted(produced.keys() | accounted.keys())
        if produced.get((fleet, version)) != accounted.get((fleet, version))
    ]
    made = sum(counts.groups for counts in produced.values())
    if ledger.groups_started != made + ledger.groups_refunded + ledger.permits_outstanding:
        wrong.append(
            f"groups started {ledger.groups_started} != produced {made} + refunded {ledger.groups_refunded} "
            f"+ outstanding {ledger.permits_outstanding}"
        )
    return wrong


def balanced(ledger: experience_pb2.LedgerResponse) -> bool:
    """Whether nothing was lost and nothing counted twice."""
    return not imbalances(ledger)


def ledger_table(ledger: experience_pb2.LedgerResponse) -> Table:
    """The ledger for people."""
    table = Table("fleet", "version", "state", title="ledger")
    for column in ("groups", "trajectories", "tokens"):
        table.add_column(column, justify="right")
    for row in ledger.rows:
        version = "" if row.state.startswith("refunded:") else str(Version.from_proto(row.version))
        table.add_row(row.fleet, version, row.state, str(row.groups), str(row.trajectories), str(row.tokens))
    table.caption = (
        f"groups: {ledger.groups_started} started, {ledger.groups_refunded} refunded, "
        f"{ledger.permits_outstanding} outstanding; {'balanced' if balanced(ledger) else 'NOT BALANCED'}"
    )
    return table


def _is_produced(state: str) -> bool:
    return state == "produced"


def _is_accounted(state: str) -> bool:
    return state in {"trained", "buffered", "leased"} or state.startswith("dropped:")


def _sums(rows: Iterable[Row], wanted: Callable[[str], bool]) -> dict[tuple[str, Version], Counts]:
    sums: dict[tuple[str, Version], Counts] = {}
    for row in rows:
        if wanted(row.state):
            key = (row.fleet, Version.from_proto(row.version))
            sums[key] = sums.get(key, Counts()) + Counts(row.groups, row.trajectories, row.tokens)
    return sums
