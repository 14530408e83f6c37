"""Batches out, steps committed."""

from __future__ import annotations

from forebay.buffer import batching
from forebay.buffer.errors import CallRefused
from forebay.buffer.ledger import Batch
from forebay.buffer.reservoir import Reservoir
from forebay.wire.v1 import common_pb2, experience_pb2, journal_pb2


class Outlet:
    """The learner's side of the reservoir. Answers may be sent after `Reservoir.durable`."""

    def __init__(self, reservoir: Reservoir) -> None:
        self._reservoir = reservoir

    def lease(self, request: experience_pb2.LeaseRequest) -> Batch | None:
        """The batch of the next step; None while it is not complete. Raises CallRefused."""
        self._reservoir.speaker(request.member, common_pb2.ROLE_LEARNER)
        state = self._reservoir.state
        if request.step != state.committed + 1:
            raise CallRefused(
                f"step {request.step} cannot be leased: step {state.committed} was committed last, so the next is "
                f"{state.committed + 1}; rewind to a checkpoint to train an earlier one again"
            )
        if state.paused:
            self._wait(request.step, f"the run to be resumed (paused: {state.paused})")
            return None
        known = state.batches.get(request.step)
        group_ids = known.group_ids if known else self._compose(request.step)
        return self._record(request, known, group_ids) if group_ids else None

    def commit(self, request: experience_pb2.CommitRequest) -> None:
        """The step is done; said again it is no news. Raises CallRefused."""
        self._reservoir.speaker(request.member, common_pb2.ROLE_LEARNER)
        state = self._reservoir.state
        if request.checkpoint_step > request.step:
            raise CallRefused(f"checkpoint {request.checkpoint_step} lies beyond the committed step {request.step}")
        if request.step > state.committed + 1 or (request.step > state.committed and request.step not in state.batches):
            raise CallRefused(f"step {request.step} cannot be committed: {state.committed + 1} is next, once leased")
        if request.step <= state.committed and request.checkpoint_step <= state.checkpoint:
            return
        committed = journal_pb2.Committed(
            member=request.member,
            step=request.step,
            checkpoint_step=request.checkpoint_step,
            metrics_json=request.metrics_json,
            final_step=batching.final_step(state, self._reservoir.rules, request.checkpoint_step),
        )
        self._reservoir.record(journal_pb2.Event(committed=committed))
        self._reservoir.changed()

    def rewind(self, request: experience_pb2.RewindRequest) -> int:
        """Back to a checkpoint; how many batches will be leased again. Raises CallRefused."""
        self._reservoir.speaker(request.member, common_pb2.ROLE_LEARNER)
        state, step = self._reservoir.state, request.checkpoint_step
        if not state.final <= step <= state.committed:
            raise CallRefused(
                f"cannot rewind to checkpoint {step}: the buffer can go back to steps {state.final} to "
                f"{state.committed}; resume from a checkpoint in that range, or start a new run"
            )
        rewound = journal_pb2.Rewound(member=request.member, checkpoint_step=step)
        self._reservoir.record(journal_pb2.Event(rewound=rewound))
        self._reservoir.changed()
        return sum(1 for later in state.batches if later > step)

    def _compose(self, step: int) -> tuple[int, ...]:
        reservoir = self._reservoir
        found = batching.compose(reservoir.state, reservoir.rules, step)
        if found.stale:
            dropped = journal_pb2.Dropped(group_ids=found.stale, reason="stale")
            reservoir.record(journal_pb2.Event(dropped=dropped))
            reservoir.permits_changed.notify()
        if found.missing:
            self._wait(step, f"samplers: {found.missing} more groups for step {step}")
        return found.chosen

    def _record(self, request: experience_pb2.LeaseRequest, known: Batch | None, group_ids: tuple[int, ...]) -> Batch:
        batch = Batch(attempt=known.attempt + 1 if known else 1, group_ids=group_ids)
        leased = journal_pb2.Leased(
            member=request.member, step=request.step, attempt=batch.attempt, group_ids=group_ids
        )
        self._reservoir.record(journal_pb2.Event(leased=leased))
        self._reservoir.lease_waits = None
        return batch

    def _wait(self, step: int, cause: str) -> None:
        waits = self._reservoir.lease_waits
        since = waits[2] if waits and waits[0] == step else self._reservoir.clock()
        self._reservoir.lease_waits = (step, cause, since)
