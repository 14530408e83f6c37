"""The buffer as the ranks of a learner see it together: one member, for which the lead speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forebay.buffer.client import EncodedWeights, Ended, Lease, Membership, Part, Unreachable, Waiting
from forebay.learner.port import PartedPort
from forebay.learner.ranks import Ranks
from forebay.wire.v1 import control_pb2, weights_pb2
from forebay.wire.version import Version


class RankedPort:
    """A `BufferPort` on every rank. `join`, `lease` and `rewind` are collective calls; what the lead alone does, does
    nothing on the others. An error of the buffer is raised on the lead, whose end is the end of all."""

    def __init__(self, client: PartedPort, ranks: Ranks, part: Part) -> None:
        """`part`: of every batch, this rank's."""
        self._client, self._ranks, self._part = client, ranks, part

    def join(self, role: str, id: str, fleet: str, region: str, run_json: str) -> Membership:
        """The lead's membership, in whose name the others lease."""
        lead = self._ranks.is_lead
        joined = self._ranks.agreed(self._client.join(role, id, fleet, region, run_json) if lead else None)
        assert joined is not None
        if not lead:
            self._client.speak_for(joined.member)
        return joined

    def heartbeat(
        self, doing: str, since_s: float, version: Version | None, digest: bytes, gauges: Mapping[str, float]
    ) -> control_pb2.HeartbeatResponse:
        """The lead's."""
        if not self._ranks.is_lead:
            return control_pb2.HeartbeatResponse()
        return self._client.heartbeat(doing, since_s, version, digest, gauges)

    def lease(self, step: int, wait_s: float) -> Lease | Waiting | Ended:
        """This rank's part of the batch, when every rank has its part of the same one."""
        mine = self._leads_answer(step, wait_s) if self._ranks.is_lead else None
        told = self._ranks.agreed(_outline(mine))
        if isinstance(told, Waiting | Ended):
            return told
        if mine is None:
            mine = self._client.lease(step, wait_s, part=self._part)
        if all(outline == told for outline in self._ranks.gathered(_outline(mine))):
            return mine
        # It was paused, or composed anew, between the lead's call and another one's.
        return Waiting(cause=f"the same batch of step {step} on all {self._ranks.count} ranks")

    def _leads_answer(self, step: int, wait_s: float) -> Lease | Waiting | Ended:
        try:
            return self._client.lease(step, wait_s, part=self._part)
        except Unreachable as error:  # somebody wants the learner to stop; all ranks go through the loop for that
            return Waiting(cause=str(error))

    def reject(self, lease: Lease, group_ids: Sequence[int], reason: str) -> None:
        """The lead's."""
        if self._ranks.is_lead:
            self._client.reject(lease, group_ids, reason)

    def commit(self, step: int, checkpoint_step: int, metrics: Mapping[str, Any], attempt: int = 0) -> None:
        """The lead's."""
        if self._ranks.is_lead:
            self._client.commit(step, checkpoint_step, metrics, attempt)

    def rewind(self, checkpoint_step: int) -> int:
        """The lead's."""
        return self._ranks.agreed(self._client.rewind(checkpoint_step) if self._ranks.is_lead else 0)

    @property
    def anchor_wanted(self) -> bool:
        """What the lead was told."""
        return self._client.anchor_wanted

    def publish(self, encoded: EncodedWeights) -> int:
        """The lead's."""
        return self._client.publish(encoded) if self._ranks.is_lead else 0

    def plan(self, held: Version | None, held_digest: bytes) -> weights_pb2.PlanResponse:
        """Each rank's own."""
        return self._client.plan(held, held_digest)

    def pause(self, reason: str) -> None:
        """The lead's."""
        if self._ranks.is_lead:
            self._client.pause(reason)

    def leave(self, reason: str) -> None:
        """The lead's."""
        if self._ranks.is_lead:
            self._client.leave(reason)


def _outline(answer: Lease | Waiting | Ended | None) -> tuple[int, tuple[int, ...]] | Waiting | Ended | None:
    """Which batch it is, without its frames."""
    return (answer.attempt, answer.group_ids) if isinstance(answer, Lease) else answer
