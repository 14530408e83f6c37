"""A ledger as a table for people: a row a fleet (or version), a column a state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version

FIRST_STATES = ("produced", "trained", "buffered", "leased")


@dataclass(frozen=True, slots=True)
class Amount:
    """Groups, and the tokens generated in them."""

    groups: int = 0
    tokens: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.groups + other.groups, self.tokens + other.tokens)

    def __str__(self) -> str:
        return f"{self.groups} ({self.tokens})" if self.tokens else str(self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What became of everything that one fleet produced from one version (None: from all)."""

    fleet: str
    version: Version | None
    states: dict[str, Amount]


def accounts(rows: Iterable[experience_pb2.LedgerRow], *, by_version: bool) -> list[Account]:
    """One account a fleet, or a fleet and version, ordered."""
    states: dict[tuple[str, Version | None], dict[str, Amount]] = {}
    for row in sorted(rows, key=lambda row: (row.fleet, row.version.incarnation, row.version.step)):
        version = Version.from_proto(row.version) if by_version and row.HasField("version") else None
        account = states.setdefault((row.fleet, version), {})
        account[row.state] = account.get(row.state, Amount()) + Amount(row.groups, row.tokens)
    return [Account(fleet=fleet, version=version, states=found) for (fleet, version), found in states.items()]


def accounts_table(shown: list[Account]) -> Table:
    """Groups and, in brackets, generated tokens."""
    others = sorted({state for account in shown for state in account.states} - set(FIRST_STATES))
    table = Table(box=None, pad_edge=False, header_style="bold", title="groups (tokens)", title_justify="left")
    table.add_column("fleet")
    table.add_column("version", justify="right")
    for state in (*FIRST_STATES, *others):
        table.add_column(state.replace(":", ": "), justify="right")
    for account in shown:
        cells = (str(account.states.get(state, "–")) for state in (*FIRST_STATES, *others))
        table.add_row(Text(account.fleet), str(account.version or "all"), *cells)
    return table
