"""Policy versions: which weights generated a token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering

from forebay.wire.v1 import common_pb2


@total_ordering
@dataclass(frozen=True, slots=True)
class Version:
    """The weights after `step`, published by learner `incarnation`. Ordered by incarnation, then step."""

    incarnation: int
    step: int

    def __lt__(self, other: Version) -> bool:
        return (self.incarnation, self.step) < (other.incarnation, other.step)

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read what `str` wrote. Raises ValueError on anything else."""
        incarnation, _, step = text.partition(".")
        return cls(int(incarnation), int(step))

    @property
    def packed(self) -> int:
        """One int64: incarnation in the upper, step in the lower 32 bits."""
        return self.incarnation << 32 | self.step

    @classmethod
    def unpack(cls, packed: int) -> Version:
        """The inverse of `packed`."""
        return cls(packed >> 32, packed & 0xFFFFFFFF)

    def to_proto(self) -> common_pb2.Version:
        """The wire message."""
        return common_pb2.Version(incarnation=self.incarnation, step=self.step)

    @classmethod
    def from_proto(cls, message: common_pb2.Version) -> Version:
        """Read the wire message."""
        return cls(message.incarnation, message.step)
