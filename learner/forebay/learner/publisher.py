"""Publishing weights behind training's back: the copy to the host is all that training waits for.

Three host copies at most: the base (what the buffer stores), the one being sent, the one waiting. A newer version
takes the waiting one's place, so nothing queues up behind a slow link. The base moves on only when the buffer has
stored a version; after any failure the next version is an anchor, which needs no base.

Of several ranks each copies, compares and encodes its own run of tensors; the lead puts the parts together and sends
them. All ranks hold the same versions: which one is replaced, and which one is sent, the lead decides.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.buffer.client import Refused
from forebay.errors import ForebayError
from forebay.learner.errors import LearnerError
from forebay.learner.port import BufferPort
from forebay.learner.ranks import ALONE, Ranks
from forebay.wire.parts import EncodedPart, join, share_out
from forebay.wire.version import Version
from forebay.wire.weights import Encoded, HostState, TensorSpec, encode_anchor, encode_delta

#: Times that one version is offered before publishing has failed.
TRIES = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version that the buffer has stored."""

    version: Version
    digest: bytes
    anchor: bool
    sent_bytes: int
    full_bytes: int


@dataclass(slots=True)
class _Held:
    """A host copy and the version it holds."""

    state: HostState
    version: Version | None = None
    digest: bytes = b""  #: of the whole state, all ranks together, once it is stored


class Publisher:
    """Sends versions in a thread of its own, newest first. The methods are for one training thread; all ranks make the
    same calls."""

    def __init__(
        self,
        client: BufferPort,
        specs: Sequence[TensorSpec],
        incarnation: int,
        anchor_every: int,
        *,
        classes: bool = False,
        model_digest: bytes = b"",
        ranks: Ranks = ALONE,
    ) -> None:
        """`model_digest`: of the model that the weights are an adapter for."""
        self._client, self._model_digest = client, model_digest
        self._ranks, self._workers = ranks, ranks.apart()
        self._incarnation = incarnation
        self._anchor_every = anchor_every
        self._classes = classes
        self._specs = share_out(specs, ranks.count)[ranks.rank]
        self._changed = threading.Condition()
        self._free: list[_Held] = []
        self._waiting: deque[_Held] = deque()  #: to be sent: the lead has one at most, the others may lag behind it
        self._sending: _Held | None = None
        self._base: _Held | None = None
        self._since_anchor = 0
        self._closed = False
        self._error: BaseException | None = None
        self._last: Published | None = None
        self._unreported_bytes = 0
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    @property
    def last(self) -> Published | None:
        """The newest version that is stored."""
        with self._changed:
            return self._last

    def take_sent_bytes(self) -> int:
        """Bytes published since the last call."""
        with self._changed:
            sent, self._unreported_bytes = self._unreported_bytes, 0
            return sent

    def offer(self, step: int, fill: Callable[[HostState], None]) -> None:
        """Copy the weights after `step` with `fill` and return; a version still waiting is replaced. `fill` gets room
        for this rank's tensors.

        Raises LearnerError when an earlier version could not be published.
        """
        held = self._take_room()
        fill(held.state)
        held.version = Version(self._incarnation, step)
        with self._changed:
            self._waiting.append(held)
            self._changed.notify_all()

    def adopt(self, state: HostState, fill: Callable[[HostState], None]) -> None:
        """Start from the buffer's newest version if it is the lead's `state`, bit for bit: then a delta of nothing is
        sent. `fill` as in `offer`."""
        version = self._ranks.agreed(self._stored_as(state) if self._ranks.is_lead else None)
        if version is None:
            return
        held = self._take_room()
        fill(held.state)
        held.version = version
        held.digest = state.digest() if self._ranks.is_lead else b""
        with self._changed:
            self._base = held

    def wait_stored(self, timeout_s: float | None = None) -> bool:
        """Wait until everything offered is stored; False when `timeout_s` passed first. Raises LearnerError."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._error or not (self._waiting or self._sending), timeout_s)
            self._raise_error()
            return bool(done)

    def close(self, timeout_s: float | None = None) -> bool:
        """Send what is waiting, then end the thread; False when `timeout_s` passed first."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _stored_as(self, state: HostState) -> Version | None:
        try:
            plan = self._client.plan(None, b"")
        except Refused:
            return None  # nothing is published yet
        return Version.from_proto(plan.version) if plan.digest == state.digest() else None

    def _take_room(self) -> _Held:
        """Of what waits, if it still waits on the lead, whose thread may take it at any time."""
        taken = self._take_back() if self._ranks.is_lead else None
        if self._ranks.agreed(taken is not None):
            held = taken or self._take_back()
            assert held is not None, "every rank holds what the lead holds"
            return held
        with self._changed:
            if self._free:
                return self._free.pop()
        return _Held(HostState.allocate(self._specs))

    def _take_back(self) -> _Held | None:
        with self._changed:
            self._raise_error()
            return self._waiting.pop() if self._waiting else None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise LearnerError(f"weights could not be published: {self._error}") from self._error

    def _work(self) -> None:
        try:
            while (held := self._next()) is not None:
                self._stored(held, self._send(held))
        except BaseException as error:
            self._fail(error)

    def _next(self) -> _Held | None:
        """What is to be sent next; None when the lead is closed and has nothing left."""
        held = self._take_next() if self._ranks.is_lead else None
        if not self._workers.agreed(held is not None):
            return None
        return held or self._take_next()

    def _take_next(self) -> _Held | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._sending = self._waiting.popleft() if self._waiting else None
            return self._sending

    def _send(self, held: _Held) -> Published:
        for attempt in range(1, TRIES + 1):
            parts = self._workers.collected(EncodedPart.of(self._encode(held), held.state))
            published, problem = self._workers.agreed(self._store(parts) if self._ranks.is_lead else (None, ""))
            if published is not None:
                return published
            self._drop_base()
            if attempt < TRIES:
                log.warning("version %s was not stored (%s), sending a full copy", held.version, problem)
        raise LearnerError(problem)

    def _store(self, parts: Sequence[EncodedPart]) -> tuple[Published | None, str]:
        """Send what all ranks have encoded; what became of it, or why nothing did."""
        base = b"" if parts[0].encoded.manifest.anchor or self._base is None else self._base.digest
        encoded = join(parts, base)
        encoded.manifest.model_digest = self._model_digest
        try:
            self._client.publish(encoded)
        except ForebayError as error:
            return None, str(error)
        return _published(encoded), ""

    def _encode(self, held: _Held) -> Encoded:
        assert held.version is not None
        base = self._base
        due = self._since_anchor >= self._anchor_every - 1 or self._client.anchor_wanted
        if base is None or base.version is None or self._workers.agreed(due):
            return encode_anchor(held.state, version=held.version)
        return encode_delta(
            base.state, held.state, version=held.version, base_version=base.version, classes=self._classes
        )

    def _drop_base(self) -> None:
        with self._changed:
            if self._base is not None:
                self._free.append(self._base)
            self._base = None

    def _stored(self, held: _Held, published: Published) -> None:
        self._drop_base()
        held.digest = published.digest
        with self._changed:
            self._base, self._sending, self._last = held, None, published
            self._since_anchor = 0 if published.anchor else self._since_anchor + 1
            self._unreported_bytes += published.sent_bytes
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        log.error("publishing failed: %s", error)
        with self._changed:
            self._error, self._sending = error, None
            self._changed.notify_all()


def _published(encoded: Encoded) -> Published:
    manifest = encoded.manifest
    return Published(
        version=Version.from_proto(manifest.version),
        digest=manifest.digest,
        anchor=manifest.anchor,
        sent_bytes=manifest.payload_bytes,
        full_bytes=manifest.model_bytes,
    )
