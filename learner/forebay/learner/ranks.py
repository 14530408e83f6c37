"""The ranks of one learner: processes that train one model together, each on its own part of every batch.

Rank 0, the lead, speaks for all of them: with the buffer, with the disk, with people. Whatever decides how training
goes on is agreed first, so that no rank waits in a collective call that another one never makes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.learner.sequence_parallel import Team

T = TypeVar("T")

#: A collective call may wait for a lead that waits for the buffer, which may be away for long; that a rank has died
#: its launcher notices, and the broken connections tell the others.
TIMEOUT = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among them. Every method is a collective call: all ranks make it, in the same order.

    Calls from another thread need an object of their own (`apart`).
    """

    rank: int = 0
    count: int = 1
    group: Any = None  #: the process group of these calls: through the CPU, whatever the model is on
    team: Team | None = None  #: those that share this one's sequences

    @classmethod
    def of_process_group(cls) -> Ranks:
        """Those of torch's process group, which is there already."""
        import torch.distributed as dist

        ranks = cls(rank=dist.get_rank(), count=dist.get_world_size())
        return ranks.apart() if ranks.count > 1 else ranks

    def in_teams(self, size: int) -> Ranks:
        """With every `size` neighbours a team that shares its sequences: those at this one's place in all teams, each
        of which has other data than this one. A collective call. Raises UsageError."""
        if size == 1:
            return self
        if self.count % size:
            raise UsageError(f"learner.sequence_parallel is {size}, but {self.count} ranks were started")
        import torch.distributed as dist

        from forebay.learner.sequence_parallel import Team

        place, number, teams = self.rank % size, self.rank // size, self.count // size
        team_groups = [dist.new_group(list(range(one * size, (one + 1) * size))) for one in range(teams)]
        data_groups = [
            dist.new_group(list(range(one, self.count, size)), backend="gloo", timeout=TIMEOUT) for one in range(size)
        ]
        team = Team(rank=place, count=size, group=team_groups[number])
        return Ranks(rank=number, count=teams, group=data_groups[place], team=team)

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0. No call."""
        return self.rank == 0

    def apart(self) -> Ranks:
        """The same ranks, for another thread."""
        if self.count == 1:
            return self
        import torch.distributed as dist

        return Ranks(rank=self.rank, count=self.count, group=dist.new_group(backend="gloo", timeout=TIMEOUT))

    def agreed(self, value: T) -> T:
        """The lead's value."""
        if self.count == 1:
            return value
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, group_src=0, group=self.group)
        return values[0]

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks."""
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def collected(self, value: T) -> list[T]:
        """What `gathered` gives, to the lead alone; to the others nothing. For what is large."""
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.count if self.is_lead else None
        dist.gather_object(value, values, group_dst=0, group=self.group)
        return values or []

    def total(self, value: float) -> float:
        """The sum over all ranks, the same bits on each."""
        return math.fsum(self.gathered(value))


ALONE = Ranks()
