"""The conservation law, read from a ledger: produced = trained + buffered + leased + dropped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version

DROPPED = "dropped:"
MEASURES = ("groups", "trajectories", "tokens")


@dataclass(frozen=True, slots=True)
class Amount:
    """Groups, their trajectories, and their generated tokens."""

    groups: int = 0
    trajectories: int = 0
    tokens: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.groups + other.groups, self.trajectories + other.trajectories, self.tokens + other.tokens)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.groups - other.groups, self.trajectories - other.trajectories, self.tokens - other.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What became of everything that one fleet produced from one version (None: from all)."""

    fleet: str
    version: Version | None
    states: dict[str, Amount]

    @property
    def produced(self) -> Amount:
        """What came in."""
        return self.states.get("produced", Amount())

    @property
    def missing(self) -> Amount:
        """Produced, but in no state; zero when the account balances, negative when something counts twice."""
        found = Amount()
        for state, amount in self.states.items():
            if state != "produced":
                found += amount
        return self.produced - found

    @property
    def balanced(self) -> bool:
        """Whether everything produced is in exactly one state."""
        return self.missing == Amount()

    @property
    def dropped(self) -> dict[str, Amount]:
        """By reason."""
        return {state.removeprefix(DROPPED): a for state, a in self.states.items() if state.startswith(DROPPED)}


def accounts(rows: Iterable[experience_pb2.LedgerRow]) -> list[Account]:
    """One account a fleet and version, ordered."""
    states: dict[tuple[str, Version], dict[str, Amount]] = {}
    for row in rows:
        account = states.setdefault((row.fleet, Version.from_proto(row.version)), {})
        amount = Amount(row.groups, row.trajectories, row.tokens)
        account[row.state] = account.get(row.state, Amount()) + amount
    return [Account(fleet=key[0], version=key[1], states=states[key]) for key in sorted(states)]


def by_fleet(found: Iterable[Account]) -> list[Account]:
    """The same, versions added up."""
    totals: dict[str, dict[str, Amount]] = {}
    for account in found:
        total = totals.setdefault(account.fleet, {})
        for state, amount in account.states.items():
            total[state] = total.get(state, Amount()) + amount
    return [Account(fleet=fleet, version=None, states=states) for fleet, states in totals.items()]


def unbalanced(rows: Iterable[experience_pb2.LedgerRow]) -> list[Account]:
    """The accounts that do not balance. Each is looked at by itself: two errors must not cancel out."""
    return [account for account in accounts(rows) if not account.balanced]
