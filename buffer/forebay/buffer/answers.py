"""What a client of the buffer gets: answers and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forebay.errors import ForebayError, UsageError
from forebay.wire.v1 import common_pb2, experience_pb2, weights_pb2


class Refused(ForebayError):
    """The buffer does not do what was asked; the message says why and what would be right."""


class RunMismatch(UsageError):
    """This service's run-defining settings differ from the run's; the message is the diff."""


class Fenced(Refused):
    """A newer incarnation took this member's place: stop."""


class FrameRefused(Refused):
    """The buffer will never take this frame; its groups are still outstanding: refund them."""


class Unreachable(ForebayError):
    """The buffer cannot be reached, and whoever called has somewhere else to be."""


class PlanOutdated(Refused, LookupError):
    """A version of the plan was deleted meanwhile: make a new plan."""


class WeightsDamaged(ForebayError):
    """A fetched chunk does not match its digest, again and again."""


class ExperienceLost(ForebayError):
    """The buffer no longer has frames that it had acknowledged: its disk lost data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Granted by `join`."""

    member: common_pb2.Member
    run: str
    heartbeat_s: float
    committed_step: int
    checkpoint_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which groups of a batch are meant: every `parts`-th, from the one at `part` on. Ranks share out batches so."""

    part: int = 0
    parts: int = 1

    def of(self, group_ids: Sequence[int]) -> Sequence[int]:
        """Of a whole batch's groups, this part's."""
        return group_ids[self.part :: self.parts]


WHOLE = Part()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The batch of a step: its groups in training order, and the frames that hold `part` of them (and maybe others)."""

    step: int
    attempt: int
    group_ids: tuple[int, ...]
    frames: tuple[experience_pb2.Frame, ...]
    part: Part = WHOLE

    @property
    def own_ids(self) -> Sequence[int]:
        """Groups of the part."""
        return self.part.of(self.group_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A step that is done: see `BufferClient.commit`."""

    step: int
    checkpoint_step: int
    metrics: Mapping[str, Any]
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """There is no batch yet, and what it waits for."""

    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """There will never be another batch, and why."""

    cause: str


class EncodedWeights(Protocol):
    """What `forebay.wire.weights` makes of a version."""

    @property
    def manifest(self) -> weights_pb2.Manifest:
        """Describes the payload."""
        ...

    @property
    def chunks(self) -> Mapping[bytes, bytes]:
        """Chunk bytes by digest."""
        ...
