"""The buffer as its members see it, for asyncio."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

import grpc.aio

from forebay.buffer.answers import WHOLE, EncodedWeights, Ended, Fenced, Lease, Membership, Part, Trained, Waiting
from forebay.buffer.link import Link
from forebay.buffer.outbox import Outbox
from forebay.buffer.weight_fetch import ChunkFetcher
from forebay.wire.trajectory import Trajectory
from forebay.wire.v1 import (
    common_pb2,
    control_pb2,
    control_pb2_grpc,
    experience_pb2,
    experience_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)
from forebay.wire.version import Version

A = TypeVar("A")

PIECE_BYTES = 2 << 20
_ANSWER_S = 30.0  #: an answer that takes longer than this beyond the long poll is asked for again
_ACK_LEVELS = {
    "memory": experience_pb2.MEMORY,
    "written": experience_pb2.WRITTEN,
    "durable": experience_pb2.DURABLE,
}
_ROLES = {
    "sampler": common_pb2.ROLE_SAMPLER,
    "learner": common_pb2.ROLE_LEARNER,
    "edge": common_pb2.ROLE_EDGE,
}


class BufferClient:
    """Calls to one buffer. Every call is tried again for as long as the buffer cannot be reached.

    `channel` (`in_process.InProcessChannel`) takes the place of a connection to `address`.
    `run` names the run to look at or steer when the buffer serves several; `join` finds it in the run file.
    `ack` says how safe a frame must be before `append` returns: in the buffer's memory, written to its operating
    system, or durable on its disk. `on_trouble` gets a line now and then while the buffer cannot be reached, and one
    when it is back; by default they are logged. While `in_a_hurry` says so (a process was asked to stop), a buffer that
    has not been reached for ten seconds is given up: Unreachable.
    All calls raise Refused (or one of its kin) when the buffer forbids what was asked.
    """

    def __init__(
        self,
        address: str,
        *,
        channel: Any = None,
        clock: Callable[[], float] = time.monotonic,
        on_trouble: Callable[[str], None] | None = None,
        max_outbox_bytes: int = 64 << 20,
        run: str = "",
        ack: Literal["memory", "written", "durable"] = "durable",
        in_a_hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        self._link = Link(address, channel=channel, clock=clock, on_trouble=on_trouble, in_a_hurry=in_a_hurry)
        self._experience: Any = experience_pb2_grpc.ExperienceStub(self._link.channel)  # type: ignore[no-untyped-call]
        self._weights: Any = weights_pb2_grpc.WeightsStub(self._link.channel)  # type: ignore[no-untyped-call]
        self._control: Any = control_pb2_grpc.ControlStub(self._link.channel)  # type: ignore[no-untyped-call]
        self._max_outbox_bytes, self._ack = max_outbox_bytes, _ACK_LEVELS[ack]
        self._run, self._member, self._fleet, self._region = run, common_pb2.Member(run=run), "", ""
        self._fetcher = ChunkFetcher(self._link, self._count_fetched)
        self.fetched_bytes = 0  #: of chunks, since the start
        self._outbox: Outbox | None = None
        self._admit_request = 1
        self.anchor_wanted = False  #: as the last `publish` was answered

    async def __aenter__(self) -> BufferClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up; frames that are not acknowledged are given up."""
        if self._outbox is not None:
            await self._outbox.close()
        await self._fetcher.close()
        await self._link.close()

    @property
    def member(self) -> common_pb2.Member:
        """Who this client speaks for, since `join`."""
        return self._member

    # --- taking part

    async def join(self, role: str, id: str, fleet: str, region: str, run_json: str) -> Membership:
        """Become a member ("sampler", "learner" or "edge"). Raises RunMismatch with the diff."""
        request = control_pb2.JoinRequest(role=_ROLES[role], id=id, fleet=fleet, region=region, run_json=run_json)
        answer: control_pb2.JoinResponse = await self._ask(self._control.Join, request)
        self._run, self._member, self._fleet, self._region = answer.run, answer.member, fleet, region
        if self._outbox is not None:
            await self._outbox.close()
        self._outbox = Outbox(
            self._link, self._experience, self._member, max_bytes=self._max_outbox_bytes, level=self._ack
        )
        self._admit_request = 1
        return Membership(
            member=answer.member,
            run=answer.run,
            heartbeat_s=answer.heartbeat_s,
            committed_step=answer.committed_step,
            checkpoint_step=answer.checkpoint_step,
        )

    def speak_for(self, member: common_pb2.Member) -> None:
        """Lease in the name of a member that another client joined as: a rank of its learner, say."""
        self._member = member

    async def heartbeat(
        self, doing: str, since_s: float, version: Version | None, digest: bytes, gauges: Mapping[str, float]
    ) -> control_pb2.HeartbeatResponse:
        """Say what this member has been doing for `since_s` seconds. Raises Fenced when it was replaced."""
        request = control_pb2.HeartbeatRequest(
            member=self._member, doing=doing, since_s=since_s, digest=digest, gauges=gauges
        )
        if version is not None:
            request.version.CopyFrom(version.to_proto())
        answer: control_pb2.HeartbeatResponse = await self._ask(self._control.Heartbeat, request)
        if answer.fenced:
            raise Fenced(f"{self._member.id} was replaced by a newer incarnation: stop")
        return answer

    async def leave(self, reason: str) -> None:
        """Say goodbye; what this member has in hand goes to others."""
        await self._ask(self._control.Leave, control_pb2.LeaveRequest(member=self._member, reason=reason))

    # --- experience

    async def admit(self, groups: int, held: Version | None, wait_s: float) -> experience_pb2.AdmitResponse:
        """Permits for at most `groups` groups, waiting `wait_s` for the first (the buffer caps it).

        A call that was cut off or cancelled is continued by the next one, so that no permit gets lost.
        """
        request = experience_pb2.AdmitRequest(
            member=self._member, groups=groups, wait_s=wait_s, request=self._admit_request
        )
        if held is not None:
            request.held.CopyFrom(held.to_proto())
        answer: experience_pb2.AdmitResponse = await self._ask(self._experience.Admit, request, wait_s)
        self._admit_request += 1
        return answer

    async def append(self, frame_builder: Callable[[int], experience_pb2.Frame]) -> None:
        """Return when the frame that `frame_builder` makes of its sequence number is safe in the buffer's journal.

        The builder runs in a thread; calls may overlap, frames keep the order of the calls. Raises FrameRefused.
        """
        if self._outbox is None:
            raise RuntimeError("join before appending")
        await self._outbox.append(frame_builder)

    async def push(
        self,
        trajectories: Sequence[Trajectory],
        permits: Sequence[experience_pb2.Permit],
        *,
        codec: str = "zstd+exact",
    ) -> None:
        """Append whole groups as one frame; `permits` are those of its groups. Raises FrameError, FrameRefused."""
        from forebay.wire.experience import encode_frame  # needs pyarrow, which those who only ask do not

        member, fleet, region = self._member, self._fleet, self._region
        attempts = {permit.group_id: permit.attempt for permit in permits}
        await self.append(
            lambda sequence: encode_frame(
                trajectories, run=self._run, sampler=member.id, fleet=fleet, region=region,
                incarnation=member.incarnation, sequence=sequence, attempts=attempts, codec=codec,
            )
        )  # fmt: skip

    async def refund(self, refunds: Sequence[experience_pb2.Refund]) -> None:
        """Give permits back: `again` for groups that another sampler shall produce."""
        await self._ask(self._experience.Refund, experience_pb2.RefundRequest(member=self._member, refunds=refunds))

    async def lease(
        self, step: int, wait_s: float, trained: Trained | None = None, part: Part = WHOLE
    ) -> Lease | Waiting | Ended:
        """The batch of `step`, or, after `wait_s`, what it waits for; Ended when the prompts are used up.

        `trained` is the step before: it is committed first, in the same call, and is when this returns anything.
        `part`: whose frames come; which groups the batch has is said of all.
        """
        commit = self._commit_request(trained) if trained is not None else None
        request = experience_pb2.LeaseRequest(
            member=self._member, step=step, wait_s=wait_s, commit=commit, part=part.part, parts=part.parts
        )
        return await self._link.call(lambda: self._read_lease(request, part))

    async def reject(self, lease: Lease, group_ids: Sequence[int], reason: str) -> None:
        """Groups of the leased batch that cannot be trained: they become dead letters; then lease the step again."""
        await self._ask(
            self._experience.Reject,
            experience_pb2.RejectRequest(
                member=self._member, step=lease.step, attempt=lease.attempt, group_ids=group_ids, reason=reason
            ),
        )

    async def commit(self, step: int, checkpoint_step: int, metrics: Mapping[str, Any], attempt: int = 0) -> None:
        """Step `step` is trained; everything up to `checkpoint_step` is saved (0: nothing).

        `attempt` is that of the lease; Refused when the batch was leased again meanwhile (0: not checked).
        """
        trained = Trained(step=step, checkpoint_step=checkpoint_step, metrics=metrics, attempt=attempt)
        await self._ask(self._experience.Commit, self._commit_request(trained))

    async def rewind(self, checkpoint_step: int) -> int:
        """Back to a checkpoint; how many batches after it will be leased again as they were."""
        request = experience_pb2.RewindRequest(member=self._member, checkpoint_step=checkpoint_step)
        answer: experience_pb2.RewindResponse = await self._ask(self._experience.Rewind, request)
        return answer.replayed_batches

    async def ledger(self) -> experience_pb2.LedgerResponse:
        """The conservation law."""
        answer: experience_pb2.LedgerResponse = await self._ask(
            self._experience.Ledger, experience_pb2.LedgerRequest(run=self._run)
        )
        return answer

    # --- weights

    async def publish(self, encoded: EncodedWeights) -> int:
        """Publish a version; durable and announced when this returns. Returns the bytes that were new to the store.

        `anchor_wanted` says afterwards whether the next version had better be an anchor.
        """
        manifest = encoded.manifest
        request = weights_pb2.MissingRequest(member=self._member, chunks=manifest.chunks)

        async def attempt() -> int:
            missing = (await self._weights.Missing(request, timeout=_ANSWER_S)).digests
            answer = await self._weights.Publish(_publication(self._member, manifest, missing, encoded.chunks))
            self.anchor_wanted = bool(answer.anchor_wanted)
            return int(answer.stored_bytes)

        return await self._link.call(attempt)

    async def watch(self) -> AsyncIterator[weights_pb2.Announcement]:
        """The newest version now, and every newer one as it is published; survives cuts."""
        told: weights_pb2.Announcement | None = None
        tries = 0
        while True:
            try:
                async for announcement in self._weights.Watch(weights_pb2.WatchRequest(member=self._member)):
                    self._link.reached()
                    tries = 0
                    if announcement != told:
                        told = announcement
                        yield announcement
            except grpc.aio.AioRpcError as error:
                await self._link.pause_or_raise(error, tries)
                tries += 1

    async def plan(self, held: Version | None, held_digest: bytes) -> weights_pb2.PlanResponse:
        """The cheapest path from the held weights to the newest version."""
        request = weights_pb2.PlanRequest(member=self._member, held_digest=held_digest)
        if held is not None:
            request.held.CopyFrom(held.to_proto())
        answer: weights_pb2.PlanResponse = await self._ask(self._weights.Plan, request)
        return answer

    async def fetch(self, manifest: weights_pb2.Manifest) -> bytes:
        """The manifest's payload, each chunk verified; goes on where a cut left off.

        Raises PlanOutdated when the version was deleted meanwhile, WeightsDamaged.
        """
        chunks = [data async for _, data in self.fetch_chunks(manifest.chunks)]
        return await asyncio.to_thread(b"".join, chunks)

    def fetch_chunks(self, chunks: Sequence[weights_pb2.Chunk]) -> AsyncIterator[tuple[weights_pb2.Chunk, bytes]]:
        """Chunks in the order asked, as `fetch`; a few at once, over connections of their own."""
        return self._fetcher.fetch(self._member, chunks)

    # --- looking and steering

    async def status(self) -> control_pb2.StatusResponse:
        """One coherent look at the run."""
        answer: control_pb2.StatusResponse = await self._ask(
            self._control.Status, control_pb2.StatusRequest(run=self._run)
        )
        return answer

    async def history(self) -> control_pb2.HistoryResponse:
        """Every committed step's metrics and every evaluation."""
        answer: control_pb2.HistoryResponse = await self._ask(
            self._control.History, control_pb2.HistoryRequest(run=self._run)
        )
        return answer

    async def report_eval(self, result: control_pb2.EvalResult) -> None:
        """Report the score of a version on the held-out prompts."""
        await self._ask(self._control.ReportEval, control_pb2.ReportEvalRequest(member=self._member, result=result))

    async def pause(self, reason: str) -> None:
        """No new permits or batches until `resume`."""
        await self._ask(self._control.Pause, control_pb2.PauseRequest(reason=reason, run=self._run))

    async def resume(self) -> None:
        """End a pause."""
        await self._ask(self._control.Resume, control_pb2.ResumeRequest(run=self._run))

    async def drain(self) -> None:
        """Ask every member to finish what is in flight and leave."""
        await self._ask(self._control.Drain, control_pb2.DrainRequest(run=self._run))

    # --- inside

    def _count_fetched(self, count: int) -> None:
        self.fetched_bytes += count

    async def _ask(self, method: Any, request: Any, wait_s: float = 0.0) -> Any:
        async def attempt() -> Any:
            return await method(request, timeout=wait_s + _ANSWER_S)

        return await self._link.call(attempt)

    def _commit_request(self, trained: Trained) -> experience_pb2.CommitRequest:
        return experience_pb2.CommitRequest(
            member=self._member,
            step=trained.step,
            checkpoint_step=trained.checkpoint_step,
            attempt=trained.attempt,
            metrics_json=json.dumps(trained.metrics, separators=(",", ":")),
        )

    async def _read_lease(self, request: experience_pb2.LeaseRequest, part: Part) -> Lease | Waiting | Ended:
        batch, frames, cause = experience_pb2.Batch(), list[experience_pb2.Frame](), ""
        async for piece in self._experience.Lease(request):
            if piece.HasField("batch"):
                batch = piece.batch
            frames.extend(piece.frames)
            if piece.ended:
                return Ended(cause=piece.ended)
            cause = piece.waiting_for
        if cause:
            return Waiting(cause=cause)
        group_ids = tuple(batch.group_ids)
        return Lease(step=batch.step, attempt=batch.attempt, group_ids=group_ids, frames=tuple(frames), part=part)


async def _publication(
    member: common_pb2.Member, manifest: weights_pb2.Manifest, missing: Sequence[bytes], chunks: Mapping[bytes, bytes]
) -> AsyncIterator[weights_pb2.PublishRequest]:
    yield weights_pb2.PublishRequest(start=weights_pb2.PublishStart(member=member, manifest=manifest))
    for digest in missing:
        data = chunks[digest]
        for offset in range(0, len(data), PIECE_BYTES):
            piece = weights_pb2.ChunkData(digest=digest, offset=offset, data=data[offset : offset + PIECE_BYTES])
            yield weights_pb2.PublishRequest(chunk=piece)
