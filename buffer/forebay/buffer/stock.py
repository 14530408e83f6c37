"""The groups that can be leased now: what there is, how much of it, and in which order it leaves.

Every operation costs the logarithm of what is buffered at most, so that a million trajectories are no slower to lease
from than a thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedKeyList

from forebay.buffer.tally import Counts
from forebay.wire.version import Version

if TYPE_CHECKING:
    from forebay.buffer.ledger import Group

#: Sorts groups: those with the smallest key leave first. It must not change while a group is here.
Order = Callable[["Group"], Any]


class Stock:
    """Groups by id, by the step of their oldest token, and, once `order_by` was called, in order."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._by_step: dict[int, dict[int, None]] = {}
        self._used: set[int] = set()
        self._ordered: Any = None
        self.trajectories = 0
        self.unused: dict[tuple[str, Version], Counts] = {}  #: of groups that no batch had yet, by fleet and version

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stock) and (self._groups, self._used) == (other._groups, other._used)

    __hash__ = None  # type: ignore[assignment]

    def order_by(self, order: Order) -> None:
        """Keep the groups in this order from now on."""
        self._ordered = SortedKeyList(self._groups.values(), key=order)

    def add(self, group: Group, *, used: bool = False) -> None:
        """A group that can be leased; `used` when a batch had it before."""
        self.trajectories += group.counts.trajectories
        self._groups[group.group_id] = group
        self._by_step.setdefault(group.step, {})[group.group_id] = None
        if used:
            self._used.add(group.group_id)
        else:
            self._count(group, Counts.__add__)
        if self._ordered is not None:
            self._ordered.add(group)

    def remove(self, group_id: int) -> None:
        """The group cannot be leased any more."""
        group = self._groups.pop(group_id)
        self.trajectories -= group.counts.trajectories
        bucket = self._by_step[group.step]
        del bucket[group_id]
        if not bucket:
            del self._by_step[group.step]
        if group_id in self._used:
            self._used.remove(group_id)
        else:
            self._count(group, Counts.__sub__)
        if self._ordered is not None:
            self._ordered.remove(group)

    def mark_used(self, group_id: int) -> None:
        """A batch has the group, and later ones may have it too."""
        if group_id not in self._used:
            self._count(self._groups[group_id], Counts.__sub__)
            self._used.add(group_id)

    def older_than(self, step: int) -> list[int]:
        """Ids of groups with a token from before the weights of `step`, ascending."""
        return sorted(group_id for old in self._by_step if old < step for group_id in self._by_step[old])

    def first(self, count: int) -> list[int]:
        """Ids of the `count` groups that are next in order."""
        return [group.group_id for group in self._ordered[:count]]

    def at(self, places: Sequence[int]) -> list[int]:
        """Ids of the groups at these places of the order."""
        return [self._ordered[place].group_id for place in places]

    def _count(self, group: Group, change: Callable[[Counts, Counts], Counts]) -> None:
        key = (group.fleet, group.oldest)
        counts = change(self.unused.get(key, Counts()), group.counts)
        if counts.groups:
            self.unused[key] = counts
        else:
            del self.unused[key]
