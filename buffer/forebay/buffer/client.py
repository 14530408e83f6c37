"""All that other services use of the buffer: its two clients, what they answer, what they raise."""

from forebay.buffer.answers import (
    EncodedWeights,
    Ended,
    ExperienceLost,
    Fenced,
    FrameRefused,
    Lease,
    Membership,
    Part,
    PlanOutdated,
    Refused,
    RunMismatch,
    Trained,
    Unreachable,
    Waiting,
    WeightsDamaged,
)
from forebay.buffer.async_client import BufferClient
from forebay.buffer.blocking_client import BlockingClient

__all__ = [
    "BlockingClient",
    "BufferClient",
    "EncodedWeights",
    "Ended",
    "ExperienceLost",
    "Fenced",
    "FrameRefused",
    "Lease",
    "Membership",
    "Part",
    "PlanOutdated",
    "Refused",
    "RunMismatch",
    "Trained",
    "Unreachable",
    "Waiting",
    "WeightsDamaged",
]
