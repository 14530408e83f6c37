"""Counts of groups, trajectories and tokens, and the conservation law they obey."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version


@dataclass(frozen=True, slots=True)
class Counts:
    """How much of something there is. `tokens` are generated tokens."""

    groups: int = 0
    trajectories: int = 0
    tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.groups + other.groups, self.trajectories + other.trajectories, self.tokens + other.tokens)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.groups - other.groups, self.trajectories - other.trajectories, self.tokens - other.tokens)


@dataclass(slots=True)
class Tally:
    """What became of everything one fleet produced from one version; what is still in the buffer counts elsewhere."""

    produced: Counts = Counts()
    final: Counts = Counts()
    dropped: dict[str, Counts] = field(default_factory=dict)


#: One row's key: fleet, version of the oldest token, state.
RowKey = tuple[str, Version, str]


def ledger_rows(rows: dict[RowKey, Counts]) -> list[experience_pb2.LedgerRow]:
    """The rows as messages, ordered."""
    return [
        experience_pb2.LedgerRow(
            fleet=fleet,
            version=version.to_proto(),
            state=state,
            groups=counts.groups,
            trajectories=counts.trajectories,
            tokens=counts.tokens,
        )
        for (fleet, version, state), counts in sorted(rows.items())
        if counts.groups
    ]
