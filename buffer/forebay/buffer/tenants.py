"""The runs that one buffer serves: each with its own folder, journal, quotas and members; calls say which they mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from forebay.buffer.errors import RunUnknown
from forebay.buffer.intake import Intake
from forebay.buffer.outlet import Outlet
from forebay.buffer.reservoir import Reservoir
from forebay.buffer.roster import Roster
from forebay.buffer.shelf import Shelf


@dataclass(frozen=True, slots=True)
class Tenant:
    """One run, and everything that acts on it."""

    reservoir: Reservoir
    roster: Roster
    intake: Intake
    outlet: Outlet
    shelf: Shelf

    @classmethod
    def of(cls, reservoir: Reservoir) -> Tenant:
        """The run of a reservoir."""
        return cls(reservoir, Roster(reservoir), Intake(reservoir), Outlet(reservoir), Shelf(reservoir))


class Tenants:
    """All runs of a buffer, by name. There is at least one, and they never share anything but the process."""

    def __init__(self, reservoirs: Iterable[Reservoir]) -> None:
        self._tenants = {reservoir.rules.run: Tenant.of(reservoir) for reservoir in reservoirs}

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def __getitem__(self, run: str) -> Tenant:
        """The run called `run`; with "" the only one. Raises RunUnknown."""
        if not run and len(self._tenants) == 1:
            return next(iter(self._tenants.values()))
        if run not in self._tenants:
            served = ", ".join(sorted(self._tenants))
            raise RunUnknown(f"which run? this buffer serves {served}" + (f", not {run}" if run else ""))
        return self._tenants[run]

    def joined_by(self, run: str) -> Tenant:
        """The run that a service of `run` joins: if there is only one, that one can say what differs."""
        return self._tenants.get(run) or self[run if len(self._tenants) > 1 else ""]

    def of(self, request: Any) -> Tenant:
        """The run that a request names, itself or by its member. Raises RunUnknown."""
        return self[request.member.run if hasattr(request, "member") else request.run]
