"""A buffer in memory, for the learner alone: batches by step, versions by number, faults on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forebay.buffer.answers import WHOLE
from forebay.buffer.client import EncodedWeights, Ended, Lease, Membership, Part, Refused, Waiting
from forebay.errors import ForebayError
from forebay.wire.experience import encode_frame
from forebay.wire.trajectory import Trajectory
from forebay.wire.v1 import common_pb2, control_pb2, weights_pb2
from forebay.wire.version import Version
from forebay.wire.weights import HostState, apply

#: Checkpoints that a run can go back to.
KEPT = 3


class Refusal(ForebayError):
    """A fault that a test asked for."""


class FakeBuffer:
    """Implements `BufferPort`; outlives learners, like the real one."""

    def __init__(self, batch_of: Callable[[int], list[Trajectory]]) -> None:
        self._batch_of = batch_of
        self.incarnation = 0
        self.committed = 0
        self.checkpoint = 0
        self._saved = [0]
        self.leased: list[int] = []
        self.published: list[EncodedWeights] = []
        self.commits: list[tuple[int, int, dict[str, Any]]] = []
        self.rejected: list[tuple[int, tuple[int, ...], str]] = []
        self.ends_after: int | None = None
        self.pauses: list[str] = []
        self.left: list[str] = []
        self.fail_publish: list[bool] = []  #: consumed one a call; True fails it
        self.gate = threading.Event()  #: publications wait here
        self.gate.set()
        self.on_commit: Callable[[int], None] = lambda step: None

    def join(self, role: str, id: str, fleet: str, region: str, run_json: str) -> Membership:
        self.incarnation += 1
        member = common_pb2.Member(role=common_pb2.ROLE_LEARNER, id=id, incarnation=self.incarnation)
        return Membership(
            member=member, run="test", heartbeat_s=0.05, committed_step=self.committed, checkpoint_step=self.checkpoint
        )

    def heartbeat(
        self, doing: str, since_s: float, version: Version | None, digest: bytes, gauges: Mapping[str, float]
    ) -> control_pb2.HeartbeatResponse:
        return control_pb2.HeartbeatResponse()

    def speak_for(self, member: common_pb2.Member) -> None:
        raise AssertionError("one rank speaks for itself")

    def lease(self, step: int, wait_s: float, *, part: Part = WHOLE) -> Lease | Waiting | Ended:
        if self.ends_after is not None and step > self.ends_after:
            return Ended(cause="the prompts are used up")
        assert step == self.committed + 1, "a step is leased only after the one before is committed"
        self.leased.append(step)
        trajectories = self._batch_of(step)
        groups = list(dict.fromkeys(t.group_id for t in trajectories))
        frame = encode_frame(
            trajectories, run="test", sampler="s", fleet="f", region="r", incarnation=1, sequence=step,
            attempts=dict.fromkeys(groups, 1),
        )  # fmt: skip
        return Lease(step=step, attempt=1, group_ids=tuple(groups), frames=(frame,))

    def reject(self, lease: Lease, group_ids: Sequence[int], reason: str) -> None:
        self.rejected.append((lease.step, tuple(group_ids), reason))

    def commit(self, step: int, checkpoint_step: int, metrics: Mapping[str, Any], attempt: int = 0) -> None:
        assert step <= self.committed + 1
        self.committed, self.checkpoint = max(step, self.committed), checkpoint_step
        self._saved += [checkpoint_step] if checkpoint_step > self._saved[-1] else []
        self.commits.append((step, checkpoint_step, dict(metrics)))
        self.on_commit(step)

    def rewind(self, checkpoint_step: int) -> int:
        assert checkpoint_step >= self._saved[-KEPT:][0], "older batches are gone"
        assert checkpoint_step <= self.committed
        self._saved = [step for step in self._saved if step <= checkpoint_step]
        replayed, self.committed = self.committed - checkpoint_step, checkpoint_step
        return replayed

    anchor_wanted = False

    def publish(self, encoded: EncodedWeights) -> int:
        self.gate.wait(30)
        if self.fail_publish and self.fail_publish.pop(0):
            raise Refusal("not stored")
        self.published.append(encoded)
        return encoded.manifest.payload_bytes

    def plan(self, held: Version | None, held_digest: bytes) -> weights_pb2.PlanResponse:
        if not self.published:
            raise Refused("no weights are published yet")
        newest = self.published[-1].manifest
        return weights_pb2.PlanResponse(version=newest.version, digest=newest.digest)

    def pause(self, reason: str) -> None:
        self.pauses.append(reason)

    def leave(self, reason: str) -> None:
        self.left.append(reason)

    @property
    def versions(self) -> list[str]:
        """What was stored: `1.0 anchor`, `1.1`, ..."""
        return [
            f"{Version.from_proto(e.manifest.version)}{' anchor' if e.manifest.anchor else ''}" for e in self.published
        ]

    def first_digest(self) -> bytes:
        """Of the weights that were published first."""
        return bytes(self.published[0].manifest.digest)

    def newest_weights(self) -> HostState:
        """What a sampler that followed every publication holds, proved by digest."""
        first = self.published[0].manifest
        state: HostState | None = None
        for encoded in self.published:
            payload = b"".join(encoded.chunks[chunk.digest] for chunk in encoded.manifest.chunks)
            if state is None:
                assert first.anchor
                from forebay.wire.weights import TensorSpec

                state = HostState.allocate(
                    TensorSpec(name=t.name, dtype=t.dtype, shape=tuple(t.shape)) for t in first.tensors
                )
            apply(state, encoded.manifest, payload)
        assert state is not None
        return state
