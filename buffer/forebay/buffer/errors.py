"""What can go wrong inside the buffer service."""

from __future__ import annotations

from forebay.errors import ForebayError


class ReservoirError(ForebayError):
    """The root of the buffer service's own errors."""


class JournalDamaged(ReservoirError):
    """Acknowledged records cannot be read back. Names segment, offset and LSN; nothing is repaired silently."""


class JournalFailed(ReservoirError):
    """The disk refused a write or a sync: nothing after it was acknowledged; the service must restart from disk."""


class CallRefused(ReservoirError):
    """A call that the protocol forbids. `kind` tells a client which of its errors to raise."""

    kind = "refused"


class MemberFenced(CallRefused):
    """A newer incarnation speaks for this member."""

    kind = "fenced"


class MemberUnknown(CallRefused):
    """The caller never joined this buffer, or the buffer's run folder is another one than it joined."""

    kind = "unknown-member"


class RunDiffers(CallRefused, ValueError):
    """The run-defining settings differ; the message is the diff."""

    kind = "run-mismatch"


class RunUnknown(CallRefused, LookupError):
    """The buffer serves no such run, or several, and the call named none."""

    kind = "unknown-run"


class StreamsUsedUp(CallRefused):
    """The run has as many append streams open as its quota allows: try again."""

    kind = "streams-used-up"


class ChunkGone(CallRefused, LookupError):
    """The chunk was deleted since the plan was made: make a new plan."""

    kind = "chunk-gone"
