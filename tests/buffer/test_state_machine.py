"""Any order of calls, losses and restarts keeps the invariants, and the journal alone gives the same state again."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.buffer import snapshots
from forebay.buffer.conservation import imbalances, ledger_response
from forebay.buffer.intake import Intake, Received
from forebay.buffer.outlet import Outlet
from forebay.buffer.recovery import recover
from forebay.buffer.reservoir import Reservoir, open_reservoir
from forebay.buffer.roster import Roster
from forebay.buffer.state_snapshot import from_message, to_message
from forebay.config.identity import run_json
from forebay.wire.v1 import common_pb2, control_pb2, experience_pb2, journal_pb2
from forebay.wire.version import Version
from tests.buffer.support import FakeClock, UnsyncedDisk, frame_of, make_run

STEPS = 6
SAMPLERS = st.sampled_from(["s0", "s1"])


class BufferMachine(RuleBasedStateMachine):
    """Drives the reservoir below gRPC, with a plain model of what must be true."""

    sampling: ClassVar[dict[str, Any]] = {}
    times = 1

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.run_file = make_run(
            self.folder, steps=STEPS, max_staleness=2, keep_checkpoints=2, max_attempts=3, **self.sampling
        )
        self.loop = asyncio.new_event_loop()
        self.clock = FakeClock()
        self.learner = common_pb2.Member()
        self.samplers: dict[str, common_pb2.Member] = {}
        self.sequences: dict[str, int] = {}
        self.in_hand: dict[str, list[experience_pb2.Permit]] = {"s0": [], "s1": []}
        self.held: dict[int, Version] = {}
        self.arrived: set[int] = set()
        self.batches: dict[int, tuple[int, ...]] = {}
        self.trained: dict[int, tuple[int, ...]] = {}
        self.open()
        self.learner_restarts(0)
        for name in self.in_hand:
            self.sampler_restarts(name)

    def open(self) -> None:
        async def make() -> Reservoir:
            return open_reservoir(self.run_file, clock=self.clock, disk=UnsyncedDisk(), segment_bytes=2000)

        self.reservoir = self.loop.run_until_complete(make())
        self.intake, self.outlet = Intake(self.reservoir), Outlet(self.reservoir)
        self.roster = Roster(self.reservoir)

    def join(self, role: common_pb2.Role.ValueType, name: str) -> common_pb2.Member:
        request = control_pb2.JoinRequest(
            role=role, id=name, fleet="fleet", region="here", run_json=run_json(self.run_file)
        )
        return self.roster.join(request)

    # --- the learner

    @rule(back=st.integers(0, 3))
    def learner_restarts(self, back: int) -> None:
        self.learner = self.join(common_pb2.ROLE_LEARNER, "learner")
        state = self.reservoir.state
        to = [step for step in (0, *state.checkpoints) if state.final <= step <= state.committed] or [state.final]
        step = to[max(0, len(to) - 1 - back)]
        replayed = self.outlet.rewind(experience_pb2.RewindRequest(member=self.learner, checkpoint_step=step))
        assert replayed == sum(1 for known in self.batches if known > step)
        self.trained = {known: groups for known, groups in self.trained.items() if known <= step}
        self.publish()

    @rule()
    def publish(self) -> None:
        version = Version(self.learner.incarnation, self.reservoir.state.committed)
        if version not in self.reservoir.state.published:
            published = journal_pb2.Published(version=version.to_proto(), digest=str(version).encode())
            self.reservoir.record(journal_pb2.Event(published=published))

    @rule(again=st.booleans())
    def lease(self, again: bool) -> None:
        step = self.reservoir.state.committed + 1
        request = experience_pb2.LeaseRequest(member=self.learner, step=step)
        first = self.outlet.lease(request)
        batch = self.outlet.lease(request) if again else first
        if batch is None or first is None:
            assert step not in self.reservoir.state.batches, "learner after learner died of it, or there never was one"
            self.batches.pop(step, None)
            return
        if batch.tries == 1 and batch.attempt == 1:
            self.batches[step] = batch.group_ids  # composed now: maybe in place of one that learners died of
        known = self.batches[step]
        assert batch.group_ids == first.group_ids == known
        assert len(known) == 2
        self.check_staleness(step, known)

    def check_staleness(self, step: int, group_ids: tuple[int, ...]) -> None:
        for group_id in group_ids:
            assert step - 1 - self.reservoir.state.groups[group_id].oldest.step <= 2

    @rule(checkpoint=st.booleans())
    def commit(self, checkpoint: bool) -> None:
        step = self.reservoir.state.committed + 1
        if step in self.batches:
            request = experience_pb2.CommitRequest(
                member=self.learner, step=step, checkpoint_step=step if checkpoint else 0
            )
            self.outlet.commit(request)
            self.outlet.commit(request)
            self.trained[step] = self.batches[step]

    @rule(share=st.floats(0, 1))
    def reject(self, share: float) -> None:
        """Some of a leased batch cannot be trained."""
        step = self.reservoir.state.committed + 1
        batch = self.reservoir.state.batches.get(step)
        if batch is not None:
            groups = batch.group_ids[: 1 + int(share * (len(batch.group_ids) - 1))]
            request = experience_pb2.RejectRequest(
                member=self.learner, step=step, attempt=batch.attempt, group_ids=groups, reason="test"
            )
            self.outlet.reject(request)
            self.outlet.reject(request)
            del self.batches[step]

    @rule(steps=st.integers(1, 3), checkpoint=st.booleans(), publish=st.booleans(), spare=st.integers(0, 4))
    def go_on(self, steps: int, checkpoint: bool, publish: bool, spare: int) -> None:
        """What happens when nothing goes wrong; without publications, what is buffered grows stale."""
        for _ in range(steps):
            self.admit("s0", 2 + spare, 0)
            self.append("s0", 4, False)
            self.lease(False)
            self.commit(checkpoint)
            if publish:
                self.publish()

    # --- the samplers

    @rule(name=SAMPLERS)
    def sampler_restarts(self, name: str) -> None:
        self.samplers[name] = self.join(common_pb2.ROLE_SAMPLER, name)
        self.sequences[name] = 0
        self.in_hand[name] = []

    @precondition(lambda self: self.samplers)
    @rule(name=SAMPLERS, wanted=st.integers(1, 6), behind=st.integers(0, 2))
    def admit(self, name: str, wanted: int, behind: int) -> None:
        if name not in self.samplers:
            return
        state = self.reservoir.state
        held = sorted(version for version in state.published)[-1 - min(behind, len(state.published) - 1)]
        request = experience_pb2.AdmitRequest(member=self.samplers[name], groups=wanted, held=held.to_proto())
        answer = self.intake.admit(request)
        if answer is not None and answer.permits:
            newest = state.newest
            assert newest is not None
            assert not state.published[held].void
            assert state.started <= max(2, 2 * (min(newest.step, held.step) + 2 + 1) // self.times)
            assert state.started <= 2 * STEPS // self.times
            given = {permit.group_id: permit for permit in (*self.in_hand[name], *answer.permits)}
            self.in_hand[name] = list(given.values())
            self.held |= {permit.group_id: held for permit in answer.permits}

    @rule(name=SAMPLERS, count=st.integers(1, 4), resend=st.booleans(), latest=st.booleans())
    def append(self, name: str, count: int, resend: bool, latest: bool = True) -> None:
        """The groups that were admitted first, or last, of those generated by one version."""
        mine = sorted(self.in_hand[name], key=lambda permit: permit.group_id, reverse=latest)
        permits = [permit for permit in mine if self.held[permit.group_id] == self.held[mine[0].group_id]][:count]
        if not permits:
            return
        self.in_hand[name] = [permit for permit in mine if permit not in permits]
        version = self.held[permits[0].group_id]
        frame = frame_of(self.samplers[name], self.sequences[name], permits, version)
        answer = self.intake.append(self.samplers[name], Received.of(frame))
        assert answer.outcome == experience_pb2.AppendResponse.STORED, answer.detail
        self.sequences[name] += 1
        self.arrived |= {permit.group_id for permit in permits}
        if resend:
            answer = self.intake.append(self.samplers[name], Received.of(frame))
            assert answer.outcome == experience_pb2.AppendResponse.DUPLICATE

    @rule(name=SAMPLERS, again=st.booleans())
    def refund(self, name: str, again: bool) -> None:
        if self.in_hand[name]:
            permit = self.in_hand[name].pop()
            refund = experience_pb2.Refund(
                group_id=permit.group_id, attempt=permit.attempt, reason="generation_failed", again=again
            )
            self.intake.refund(experience_pb2.RefundRequest(member=self.samplers[name], refunds=[refund, refund]))

    @rule()
    def samplers_are_lost(self) -> None:
        for _ in range(5):
            self.clock.now += 5.0
            self.roster.sweep()
        assert not self.reservoir.state.permits

    # --- the buffer

    @rule()
    def snapshot(self) -> None:
        self.reservoir.journal.flush()
        folder, sealed = self.reservoir.journal.folder, self.reservoir.journal.sealed_segment
        if sealed > max(snapshots.numbers(folder), default=0):
            snapshots.make(folder, sealed, retain_bytes=500, disk=UnsyncedDisk())

    @rule(cleanly=st.booleans())
    def buffer_restarts(self, cleanly: bool) -> None:
        before = self.reservoir.state
        if cleanly:
            self.reservoir.close()
        else:
            self.reservoir.journal.flush()
        self.open()
        assert self.reservoir.state == before
        assert list(self.reservoir.state.buffered.first(99)) == list(before.buffered.first(99))

    @invariant()
    def is_balanced(self) -> None:
        assert imbalances(ledger_response(self.reservoir.state)) == []

    @invariant()
    def journal_gives_the_same_state(self) -> None:
        self.reservoir.journal.flush()
        assert recover(self.folder / "buffer" / "journal", repair=False).state == self.reservoir.state

    @invariant()
    def a_snapshot_gives_the_same_state(self) -> None:
        state = self.reservoir.state
        assert from_message(to_message(state, [])) == state

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        trained = [group_id for group_ids in self.trained.values() for group_id in group_ids]
        assert max(Counter(trained).values(), default=0) <= self.times
        assert all(len(set(group_ids)) == len(group_ids) for group_ids in self.trained.values())
        assert set(trained) <= self.arrived
        counted = sum(row.groups for (*_, name), row in self.reservoir.state.rows().items() if name == "trained")
        assert counted == len(set(trained))

    @invariant()
    def every_arrived_group_is_somewhere_once(self) -> None:
        rows = self.reservoir.state.rows()
        assert sum(counts.groups for (*_, name), counts in rows.items() if name == "produced") <= len(self.arrived)

    def teardown(self) -> None:
        self.reservoir.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.folder)


class FreshestMachine(BufferMachine):
    """The same promises under another order."""

    sampling: ClassVar[dict[str, Any]] = {"selector": "freshest"}


class ReuseMachine(BufferMachine):
    """Every group may be in two batches."""

    sampling: ClassVar[dict[str, Any]] = {"selector": "uniform", "max_times_sampled": 2}
    times = 2


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = _settings(150)
TestFreshest = FreshestMachine.TestCase
TestFreshest.settings = _settings(40)
TestReuse = ReuseMachine.TestCase
TestReuse.settings = _settings(100)
