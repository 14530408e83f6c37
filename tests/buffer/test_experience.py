"""Permits, frames, batches and commits over a real connection."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from forebay.buffer.client import (
    BufferClient,
    Fenced,
    FrameRefused,
    Lease,
    Part,
    Refused,
    RunMismatch,
    Trained,
    Waiting,
)
from forebay.buffer.conservation import balanced, imbalances, ledger_of, ledger_table
from forebay.config.identity import run_json
from forebay.wire.experience import decode_frame
from forebay.wire.v1 import common_pb2, experience_pb2, experience_pb2_grpc
from forebay.wire.version import Version
from tests.buffer.conftest import Serve
from tests.buffer.support import (
    UnsyncedDisk,
    anchor,
    frame_of,
    join_learner,
    join_sampler,
    make_run,
    produce,
    real_frame,
)

V0 = Version(1, 0)
Response = experience_pb2.AppendResponse


async def test_a_whole_run(serve: Serve) -> None:
    async with serve(checkpoint_every_steps=2) as served, served.client() as learner, served.client() as sampler:
        member = await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        for step in range(1, 5):
            permits = list((await sampler.admit(2, Version(1, step - 1), 5.0)).permits)
            build = partial(real_frame, member=sampler.member, permits=permits, version=Version(1, step - 1))
            await sampler.append(build)
            lease = await learner.lease(step, 5.0)
            assert isinstance(lease, Lease)
            decoded = {t.group_id for frame in lease.frames for t in decode_frame(frame)}
            assert set(lease.group_ids) <= decoded
            await learner.commit(step, step if step % 2 == 0 else 0, {"loss": 1.0})
            if step < 4:
                await learner.publish(anchor(Version(member.incarnation, step), seed=step))
        assert (await sampler.admit(1, Version(1, 3), 0.0)).finished
        ledger = await learner.ledger()
        assert balanced(ledger)
        assert sum(row.groups for row in ledger.rows if row.state == "trained") == 8
        status, history = await learner.status(), await learner.history()
        assert (status.state, status.step, status.limited_by) == ("finished", 4, "nothing: the run is finished")
        assert [record.step for record in history.steps] == [1, 2, 3, 4]
        journal = served.run.run.home / "buffer" / "journal"
    offline = ledger_of(journal)
    assert imbalances(offline) == []
    assert offline == ledger
    assert ledger_table(offline).row_count == len(ledger.rows)


async def test_admission_waits_and_says_for_what(serve: Serve) -> None:
    async with serve(max_staleness=0) as served, served.client() as learner, served.client() as sampler:
        await join_sampler(sampler, served.run)
        assert (await sampler.admit(4, None, 0.0)).waiting_for == "learner to publish the first weights"
        member = await join_learner(learner, served.run)
        assert (await sampler.admit(4, None, 0.0)).waiting_for == "this sampler to install version 1.0"
        assert len((await sampler.admit(9, V0, 0.0)).permits) == 2
        assert (await sampler.admit(1, V0, 0.0)).waiting_for == "learner to publish step 1"
        waiting = asyncio.create_task(sampler.admit(9, Version(1, 1), 20.0))
        await learner.publish(anchor(Version(member.incarnation, 1), seed=1))
        assert [permit.group_id for permit in (await waiting).permits] == [2, 3]


async def test_a_repeated_admission_gets_the_same_permits(serve: Serve) -> None:
    async with serve() as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        member = await join_sampler(sampler, served.run)
        stub: Any = experience_pb2_grpc.ExperienceStub(sampler._link.channel)  # type: ignore[no-untyped-call]
        request = experience_pb2.AdmitRequest(member=member, groups=2, held=V0.to_proto(), request=1)
        first, second = await stub.Admit(request), await stub.Admit(request)
        assert list(first.permits) == list(second.permits)
        assert served.reservoir.state.next_group == 2
        request.request = 2
        assert [permit.group_id for permit in (await stub.Admit(request)).permits] == [2, 3]


async def raw_append(client: BufferClient, *frames: experience_pb2.Frame) -> list[Response]:
    stub: Any = experience_pb2_grpc.ExperienceStub(client._link.channel)  # type: ignore[no-untyped-call]
    call = stub.Append()
    await call.write(experience_pb2.AppendRequest(member=client.member))
    answers = []
    for frame in frames:
        await call.write(experience_pb2.AppendRequest(frames=[frame]))
        answers.append(await call.read())
    call.cancel()
    return answers


async def test_append_answers(serve: Serve) -> None:
    async with serve() as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        member = await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(4, V0, 0.0)).permits)
        first = frame_of(member, 0, permits[:1], V0)
        other = frame_of(member, 0, permits[:1], V0, filler=1)
        ungranted = experience_pb2.Permit(group_id=99, attempt=1)
        damaged = frame_of(member, 3, permits[2:3], V0)
        damaged.payload = damaged.payload[:-1] + b"?"
        answers = await raw_append(
            sampler,
            frame_of(member, 5, permits[:1], V0),
            *[first] * 20,
            other,
            frame_of(member, 1, [ungranted], V0),
            frame_of(member, 1, permits[1:2], V0),
            frame_of(member, 2, permits[1:2], Version(7, 7)),
            damaged,
            frame_of(member, 4, permits[1:2], V0),
        )
        outcomes = [answer.outcome for answer in answers]
        assert outcomes == [
            Response.OUT_OF_SEQUENCE,
            Response.STORED,
            *[Response.DUPLICATE] * 19,
            Response.REFUSED,
            Response.REFUSED,
            Response.REFUSED,
            Response.REFUSED,
            Response.REFUSED,
            Response.STORED,
        ]
        assert answers[0].expected_sequence == 0
        details = [answer.detail for answer in answers[-6:-1]]
        assert "other content" in details[0]
        assert "99 was never granted" in details[1]
        assert "99 was never granted" in details[2]
        assert "7.7, which was never published" in details[3]
        assert "checksum" in details[4]
        assert sorted(served.reservoir.state.buffered) == [0, 1]


async def test_a_stale_incarnation_is_fenced(serve: Serve) -> None:
    async with serve() as served, served.client() as learner, served.client() as old, served.client() as new:
        await join_learner(learner, served.run)
        await join_sampler(old, served.run)
        permits = list((await old.admit(2, V0, 0.0)).permits)
        await join_sampler(new, served.run)
        with pytest.raises(Fenced):
            await old.append(lambda sequence: frame_of(old.member, sequence, permits, V0))
        with pytest.raises(Fenced):
            await old.heartbeat("generating", 0.0, None, b"", {})
        again = list((await new.admit(2, V0, 0.0)).permits)
        assert [(permit.group_id, permit.attempt) for permit in again] == [(0, 2), (1, 2)]
        await join_learner(new, served.run)
        with pytest.raises(Fenced):
            await learner.lease(1, 0.0)


async def test_lost_samplers_groups_go_to_others_and_late_ones_count_nowhere(serve: Serve) -> None:
    async with serve() as served, served.client() as learner, served.client() as slow, served.client() as quick:
        await join_learner(learner, served.run)
        await join_sampler(slow, served.run, "slow")
        await join_sampler(quick, served.run, "quick")
        late = list((await slow.admit(2, V0, 0.0)).permits)
        for _ in range(3):
            served.clock.now += 9.0
            await quick.heartbeat("generating", 0.0, V0, b"", {})
            served.roster.sweep()
        assert {m.member.id: m.state for m in (await learner.status()).members}["slow"] == "lost"
        again = list((await quick.admit(1, V0, 0.0)).permits)
        assert [(permit.group_id, permit.attempt) for permit in again] == [(0, 2)]
        await quick.append(lambda sequence: frame_of(quick.member, sequence, again, V0))
        await slow.append(lambda sequence: frame_of(slow.member, sequence, late, V0))
        assert sorted(served.reservoir.state.buffered) == [0, 1]
        ledger = await learner.ledger()
        assert balanced(ledger)
        assert sum(row.groups for row in ledger.rows if row.state == "produced") == 2


async def test_a_buffer_that_stood_still_loses_nobody(serve: Serve) -> None:
    async with serve() as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        await sampler.admit(2, V0, 0.0)
        served.clock.now += 3600.0
        assert served.roster.sweep() == []
        assert len(served.reservoir.state.permits) == 2


async def test_a_group_that_takes_too_long_is_granted_to_another_sampler(serve: Serve) -> None:
    settings = {"permit_timeout_s": 100.0, "member_timeout_s": 1000.0}
    async with serve(buffer=settings) as served, served.client() as learner, served.client() as slow:
        await join_learner(learner, served.run)
        await join_sampler(slow, served.run)
        (permit,) = (await slow.admit(1, V0, 0.0)).permits
        served.clock.now += 99.0
        served.roster.sweep()
        assert not served.reservoir.state.again
        served.clock.now += 2.0
        served.roster.sweep()
        async with served.client() as quick:
            await join_sampler(quick, served.run, "quick")
            (again,) = (await quick.admit(1, V0, 0.0)).permits
            assert (again.group_id, again.attempt) == (permit.group_id, 2)
        await slow.append(lambda sequence: frame_of(slow.member, sequence, [permit], V0))
        assert sorted(served.reservoir.state.buffered) == [permit.group_id], "the first to deliver counts"


async def test_a_refund_of_what_cannot_have_been_produced_is_refused(serve: Serve) -> None:
    async with serve() as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        (permit,) = (await sampler.admit(1, V0, 0.0)).permits
        for trajectories, version in ((99, V0), (1, Version(7, 7))):
            refund = experience_pb2.Refund(
                group_id=permit.group_id, attempt=1, reason="x", trajectories=trajectories, oldest=version.to_proto()
            )
            with pytest.raises(Refused, match="expected at most 2, published"):
                await sampler.refund([refund])
        assert served.reservoir.state.permits


async def test_refunds(serve: Serve) -> None:
    async with serve() as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(4, V0, 0.0)).permits)
        refunds = [
            experience_pb2.Refund(group_id=permit.group_id, attempt=1, reason=reason, again=again)
            for permit, reason, again in zip(permits, ("reward_failed", "drained"), (False, True), strict=False)
        ]
        await sampler.refund(refunds)
        await sampler.refund(refunds)
        assert [(p.group_id, p.attempt) for p in (await sampler.admit(9, V0, 0.0)).permits] == [(1, 2), (4, 1)]
        status, ledger = await learner.status(), await learner.ledger()
        assert dict(status.dropped) == {"reward_failed": 1}
        assert balanced(ledger)
        assert ledger.groups_refunded == 1


async def test_leases_and_rewinds(serve: Serve) -> None:
    async with serve(checkpoint_every_steps=1) as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        waiting = await learner.lease(1, 0.0)
        assert waiting == Waiting(cause="samplers: 2 more groups for step 1")
        assert "2 more groups for step 1; the learner waits" in (await learner.status()).limited_by
        leasing = asyncio.create_task(learner.lease(1, 20.0))
        await produce(sampler, 4, V0)
        first = await leasing
        assert isinstance(first, Lease)
        again = await learner.lease(1, 0.0)
        assert isinstance(again, Lease)
        assert (again.group_ids, again.attempt, again.frames) == (first.group_ids, 1, first.frames), (
            "the same learner: its answer was lost"
        )
        with pytest.raises(Refused, match="the next is 1"):
            await learner.lease(2, 0.0)
        with pytest.raises(Refused, match="once leased"):
            await learner.commit(2, 0, {})
        await learner.commit(1, 0, {"loss": 2.0})
        await learner.commit(1, 0, {"loss": 2.0})
        second = await learner.lease(2, 0.0)
        await learner.commit(2, 0, {})
        with pytest.raises(Refused, match="go back to steps 0 to 2"):
            await learner.rewind(3)
        assert await learner.rewind(0) == 2
        replayed = [await learner.lease(1, 0.0)]
        await learner.commit(1, 1, {})
        replayed.append(await learner.lease(2, 0.0))
        assert [lease.group_ids for lease in replayed if isinstance(lease, Lease)] == [
            first.group_ids,
            second.group_ids if isinstance(second, Lease) else (),
        ]


async def test_ranks_lease_their_parts_of_a_batch(serve: Serve) -> None:
    """Each in the lead's name, each frames of its own groups alone, and all of them the same batch."""
    async with serve(groups_per_step=5) as served, served.client() as lead, served.client() as sampler:
        await join_learner(lead, served.run)
        await join_sampler(sampler, served.run)
        for _ in range(5):
            await produce(sampler, 1, V0)
        async with served.client() as other:
            other.speak_for(lead.member)
            parts = [await client.lease(1, 5.0, part=Part(part=n, parts=2)) for n, client in enumerate((lead, other))]
        whole = await lead.lease(1, 5.0)
        assert isinstance(whole, Lease)
        seen = list[int]()
        for number, part in enumerate(parts):
            assert isinstance(part, Lease)
            assert (part.group_ids, part.attempt) == (whole.group_ids, 1)
            assert list(part.own_ids) == list(whole.group_ids[number::2])
            arrived = [group.group_id for frame in part.frames for group in frame.header.groups]
            assert sorted(arrived) == sorted(part.own_ids)
            seen += arrived
        assert sorted(seen) == sorted(whole.group_ids)
        with pytest.raises(Refused, match="parts count from 0"):
            await lead.lease(1, 0.0, part=Part(part=2, parts=2))
        await lead.commit(1, 0, {}, attempt=1)


async def test_a_lease_may_carry_the_commit_of_the_step_before(serve: Serve) -> None:
    async with serve() as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        await produce(sampler, 4, V0)
        first = await learner.lease(1, 5.0)
        assert isinstance(first, Lease)
        with pytest.raises(Refused, match="attempt 1 is the current one"):
            await learner.lease(2, 0.0, Trained(step=1, checkpoint_step=0, metrics={}, attempt=7))
        assert served.reservoir.state.committed == 0
        trained = Trained(step=1, checkpoint_step=1, metrics={"loss": 2.0}, attempt=first.attempt)
        second = await learner.lease(2, 5.0, trained)
        assert second == await learner.lease(2, 5.0, trained), "said again: the answer was lost"
        assert (served.reservoir.state.committed, served.reservoir.state.checkpoint) == (1, 1)
        waiting = await learner.lease(3, 0.0, Trained(step=2, checkpoint_step=0, metrics={}))
        assert isinstance(waiting, Waiting), "there is no batch yet, and still the step is committed"
        assert [record.step for record in (await learner.history()).steps] == [1, 2]
        durable = ledger_of(served.run.run.home / "buffer" / "journal")
        assert sum(row.groups for row in durable.rows if row.state == "trained") == 4


async def test_pause_stops_permits_and_batches_and_survives_a_restart(serve: Serve) -> None:
    async with serve() as served, served.client() as client:
        await client.pause("KL of 12 above 10")
    async with serve() as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        reason = "the run to be resumed (paused: KL of 12 above 10)"
        assert (await sampler.admit(1, V0, 0.0)).waiting_for == reason
        assert await learner.lease(1, 0.0) == Waiting(cause=reason)
        assert (await sampler.heartbeat("waiting", 0.0, V0, b"", {})).paused
        waiting = asyncio.create_task(sampler.admit(1, V0, 20.0))
        await learner.resume()
        assert len((await waiting).permits) == 1


class SmallDisk(UnsyncedDisk):
    """Has no room until told."""

    def __init__(self) -> None:
        self.free, self.asked = 0, 0
        self.asked_again = asyncio.Event()

    def free_bytes(self, folder: object) -> int:
        """What the test says."""
        self.asked += 1
        if self.asked == 2:
            self.asked_again.set()
        return self.free


async def test_a_full_disk_pushes_back_and_then_takes_everything(serve: Serve) -> None:
    disk = SmallDisk()
    async with serve(disk=disk) as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        producing = asyncio.create_task(produce(sampler, 4, V0))
        await disk.asked_again.wait()
        assert sampler._outbox is not None
        assert sampler._outbox.pushback == "the buffer's disk is full"
        assert (await learner.status()).limited_by == "buffer: the buffer's disk is full"
        assert not served.reservoir.state.buffered
        disk.free = 1 << 40
        assert await producing == [0, 1, 2, 3]
        assert sorted(served.reservoir.state.buffered) == [0, 1, 2, 3]


async def test_a_refused_frame_does_not_stop_the_next(serve: Serve) -> None:
    async with serve() as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        permits = list((await sampler.admit(2, V0, 0.0)).permits)
        wrong = sampler.append(lambda sequence: frame_of(sampler.member, sequence, permits[:1], Version(9, 9)))
        right = sampler.append(lambda sequence: frame_of(sampler.member, sequence, permits[1:], V0))
        results = await asyncio.gather(wrong, right, return_exceptions=True)
        assert isinstance(results[0], FrameRefused)
        assert results[1] is None


async def test_a_builder_that_fails_spends_no_sequence_number(serve: Serve) -> None:
    def fails(sequence: int) -> experience_pb2.Frame:
        raise ValueError("cannot be encoded")

    async with serve() as served, served.client() as learner, served.client() as sampler:
        await join_learner(learner, served.run)
        await join_sampler(sampler, served.run)
        with pytest.raises(ValueError, match="cannot be encoded"):
            await sampler.append(fails)
        assert await produce(sampler, 2, V0) == [0, 1]


async def test_another_run_is_refused_with_the_diff(serve: Serve, tmp_path: Any) -> None:
    async with serve() as served, served.client() as client:
        other = make_run(tmp_path, lr=1e-3)
        with pytest.raises(RunMismatch, match=r"learner.lr: 1e-06 in the run, 0.001 here"):
            await client.join("sampler", "s", "f", "r", run_json(other))
        assert served.reservoir.state.members == {}


async def test_a_stranger_is_told_to_start_anew(serve: Serve) -> None:
    async with serve() as served, served.client() as client:
        client._member.id = "ghost"
        client._member.role = common_pb2.ROLE_SAMPLER
        with pytest.raises(Refused, match="never joined"):
            await client.admit(1, V0, 0.0)
        assert served.reservoir.members.get((1, "ghost")) is None
