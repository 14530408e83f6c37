"""The ledger as a table."""

from __future__ import annotations

import io

from rich.console import Console

from forebay.obs.accounts import Amount, accounts, accounts_table
from forebay.wire.v1 import common_pb2, experience_pb2


def row(fleet: str, step: int, state: str, groups: int) -> experience_pb2.LedgerRow:
    """A row of the ledger."""
    version = common_pb2.Version(incarnation=1, step=step)
    return experience_pb2.LedgerRow(fleet=fleet, version=version, state=state, groups=groups, tokens=groups * 10)


ROWS = [
    row("b", 0, "produced", 3),
    row("a", 1, "produced", 2),
    row("a", 0, "produced", 4),
    row("a", 0, "trained", 3),
    row("a", 0, "dropped:stale", 1),
    experience_pb2.LedgerRow(fleet="a", state="refunded:reward_failed", groups=2),
]


def test_versions_are_added_up_or_not() -> None:
    assert [account.fleet for account in accounts(ROWS, by_version=False)] == ["a", "b"]
    assert accounts(ROWS, by_version=False)[0].states["produced"] == Amount(6, 60)
    assert [str(account.version) for account in accounts(ROWS, by_version=True)] == ["None", "1.0", "1.1", "1.0"]


def test_the_table_has_a_column_a_reason() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(accounts_table(accounts(ROWS, by_version=False)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("dropped: stale", "refunded: reward_failed", "6 (60)", "3 (30)"):
        assert part in text
