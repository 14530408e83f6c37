"""Batches out, steps committed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from forebay.buffer import admission, batching, selectors
from forebay.buffer.answers import WHOLE, Part
from forebay.buffer.errors import CallRefused
from forebay.buffer.ledger import Batch
from forebay.buffer.records import Position
from forebay.buffer.reservoir import Reservoir
from forebay.wire.v1 import common_pb2, experience_pb2, journal_pb2

log = logging.getLogger(__name__)

#: The reason under which the ledger counts groups that no learner could train.
DEAD_LETTER = "dead_letter"


class Outlet:
    """The learner's side of the reservoir. Answers may be sent after `Reservoir.durable`."""

    def __init__(self, reservoir: Reservoir) -> None:
        self._reservoir = reservoir

    def lease(self, request: experience_pb2.LeaseRequest) -> Batch | None:
        """The batch of the next step; None while it is not complete. Raises CallRefused."""
        self._reservoir.speaker(request.member, common_pb2.ROLE_LEARNER)
        state = self._reservoir.state
        if request.parts and request.part >= request.parts:
            raise CallRefused(f"part {request.part} of {request.parts} cannot be leased: parts count from 0")
        if request.step != state.committed + 1:
            raise CallRefused(
                f"step {request.step} cannot be leased: step {state.committed} was committed last, so the next is "
                f"{state.committed + 1}; rewind to a checkpoint to train an earlier one again"
            )
        if state.paused:
            self._wait(request.step, f"the run to be resumed (paused: {state.paused})")
            return None
        self._put_dead_batch_aside(request)
        known = state.batches.get(request.step)
        group_ids = known.group_ids if known else self._compose(request.step)
        return self._record(request, known, group_ids) if group_ids else None

    def no_batch(self) -> experience_pb2.LeaseResponse:
        """What a learner is told that got no batch."""
        if self.ended:
            data, rules = self._reservoir.rules.groups_of_data, self._reservoir.rules
            return experience_pb2.LeaseResponse(
                ended=f"the prompts are used up: task.epochs passes are {data} groups, "
                f"{len(self._reservoir.state.buffered)} are left, a step takes {rules.groups_per_step}"
            )
        waits = self._reservoir.lease_waits
        return experience_pb2.LeaseResponse(waiting_for=waits[1] if waits else "samplers")

    @property
    def ended(self) -> bool:
        """Whether there will never be another batch."""
        return admission.exhausted(self._reservoir.state, self._reservoir.rules)

    def reject(self, request: experience_pb2.RejectRequest) -> None:
        """Put groups of a leased batch aside that cannot be trained; said again it is no news. Raises CallRefused."""
        self._reservoir.speaker(request.member, common_pb2.ROLE_LEARNER)
        batch = self._reservoir.state.batches.get(request.step)
        if batch is None or request.step <= self._reservoir.state.committed or batch.attempt != request.attempt:
            return
        unknown = sorted(set(request.group_ids) - set(batch.group_ids))
        if unknown or not request.group_ids:
            raise CallRefused(f"groups {unknown} are not in the batch of step {request.step}")
        log.warning("step %d: groups %s cannot be trained: %s", request.step, list(request.group_ids), request.reason)
        self._reject(request.step, request.group_ids)

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
        self._check_attempt(request)
        committed = journal_pb2.Committed(
            member=request.member,
            step=request.step,
            checkpoint_step=request.checkpoint_step,
            metrics_json=request.metrics_json,
            final_step=batching.final_step(state, self._reservoir.rules, request.checkpoint_step),
        )
        self._reservoir.record(journal_pb2.Event(committed=committed))
        self._reservoir.changed()

    def positions(self, batch: Batch, part: Part = WHOLE) -> list[Position]:
        """Where the frames of a part of a batch lie.

        In order of arrival: of a group that was produced twice, the reader then meets the accepted copy first.
        """
        state = self._reservoir.state
        return [
            state.frames[lsn].position
            for lsn in sorted({state.groups[group].lsn for group in part.of(batch.group_ids)})
        ]

    def _check_attempt(self, request: experience_pb2.CommitRequest) -> None:
        batch = self._reservoir.state.batches.get(request.step)
        if batch is not None and request.attempt not in (0, batch.attempt):
            raise CallRefused(
                f"step {request.step} cannot be committed for attempt {request.attempt} of its lease: "
                f"attempt {batch.attempt} is the current one; lease the step again"
            )

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

    def _put_dead_batch_aside(self, request: experience_pb2.LeaseRequest) -> None:
        """A batch that learner after learner died of is dropped, and another one composed."""
        step, limit = request.step, self._reservoir.rules.max_attempts
        batch = self._reservoir.state.batches.get(step)
        if batch is not None and batch.tries >= limit and batch.incarnation != request.member.incarnation:
            log.error(
                "step %d: %d learners in a row leased this batch and none committed it; its groups %s are dead letters",
                step,
                batch.tries,
                list(batch.group_ids),
            )
            self._reject(step, batch.group_ids)

    def _reject(self, step: int, group_ids: Sequence[int]) -> None:
        rejected = journal_pb2.Rejected(step=step, group_ids=group_ids, reason=DEAD_LETTER)
        self._reservoir.record(journal_pb2.Event(rejected=rejected))
        self._reservoir.changed()

    def _compose(self, step: int) -> tuple[int, ...]:
        state, rules = self._reservoir.state, self._reservoir.rules
        stale = batching.stale(state, rules, step)
        if stale:
            self._reservoir.record(journal_pb2.Event(dropped=journal_pb2.Dropped(group_ids=stale, reason="stale")))
            self._reservoir.permits_changed.notify()
        missing = batching.missing(state, rules)
        if missing:
            self._wait(step, f"samplers: {missing} more groups for step {step}")
        return () if missing else selectors.choose(state, rules, step)

    def _record(self, request: experience_pb2.LeaseRequest, known: Batch | None, group_ids: tuple[int, ...]) -> Batch:
        state, rules = self._reservoir.state, self._reservoir.rules
        if known is not None and known.incarnation == request.member.incarnation:
            return known  # the same learner again, whose answer was lost: both answers must count
        leased = journal_pb2.Leased(
            member=request.member,
            step=request.step,
            attempt=known.attempt + 1 if known else 1,
            group_ids=group_ids,
            reusable=[] if known else selectors.reusable(state, rules, group_ids),
        )
        self._reservoir.record(journal_pb2.Event(leased=leased))
        self._reservoir.lease_waits = None
        return state.batches[request.step]

    def _wait(self, step: int, cause: str) -> None:
        waits = self._reservoir.lease_waits
        since = waits[2] if waits and waits[0] == step else self._reservoir.clock()
        self._reservoir.lease_waits = (step, cause, since)
