"""Continuous generation: permits in, groups out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from forebay.buffer.client import BufferClient, FrameRefused
from forebay.sampler.activity import Activity
from forebay.sampler.beside import end
from forebay.sampler.errors import GenerationFailed, RewardFailed
from forebay.sampler.evaluate import Examiner
from forebay.sampler.orders import Orders
from forebay.sampler.producer import Producer
from forebay.sampler.receiver import WeightReceiver
from forebay.sampler.shipper import Shipper
from forebay.wire.errors import FrameError
from forebay.wire.trajectory import Trajectory
from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version

log = logging.getLogger("forebay.sampler.rollout")

#: Long poll for permits: the buffer answers as soon as there is one.
ADMIT_WAIT_S = 20.0
#: What is in flight at SIGTERM gets this long.
DRAIN_GRACE_S = 20.0
#: Handing unfinished groups back must not hold up the end when the buffer cannot be reached.
HAND_BACK_DEADLINE_S = 5.0
#: Groups that wait for the buffer's acknowledgement at most, in multiples of the slots.
UNACKNOWLEDGED = 4


class Rollout:
    """Keeps `slots` groups in flight until told to stop."""

    def __init__(
        self,
        client: BufferClient,
        receiver: WeightReceiver,
        producer: Producer,
        shipper: Shipper,
        examiner: Examiner,
        activity: Activity,
        orders: Orders,
        *,
        slots: int,
        group_timeout_s: float,
        why_filtered: Callable[[Sequence[Trajectory]], str] = lambda group: "",
        scorable: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`scorable` returns when replies can be scored; before that, generating them would be for nothing."""
        self._client, self._receiver, self._producer, self._shipper = client, receiver, producer, shipper
        self._examiner, self._activity, self._orders = examiner, activity, orders
        self._slots, self._group_timeout_s = slots, group_timeout_s
        self._why_filtered, self._scorable = why_filtered, scorable
        self._groups: dict[asyncio.Task[None], experience_pb2.Permit] = {}  #: generating, scoring or on their way
        self._moved = asyncio.Event()  #: a group was generated, or ended
        self._failed = asyncio.Event()  #: a group ended with what concerns more than itself

    async def run(self) -> None:
        """Generate until the run is finished or this sampler drains. Raises what a group must not survive."""
        try:
            while not self._orders.stopping:
                await self._free_slot()
                await self._until_scorable()
                answer = await self._admit()
                if answer is None:
                    continue
                if answer.finished:
                    self._orders.finish()
                self._start(answer)
                if answer.HasField("eval"):
                    await self._evaluate_unless_stopped(Version.from_proto(answer.eval.version))
            await self._wind_up()
        finally:
            await end(*self._groups)

    # --- permits

    @property
    def _room(self) -> int:
        """Groups that may be started now."""
        return min(self._slots - self._activity.running_groups, UNACKNOWLEDGED * self._slots - len(self._groups))

    async def _free_slot(self) -> None:
        """Until there is room, or it is time to stop."""
        while self._room <= 0 and not self._orders.stopping:
            self._moved.clear()
            await self._first_of(asyncio.ensure_future(self._moved.wait()))

    async def _until_scorable(self) -> None:
        """Until replies can be scored, or it is time to stop."""
        if self._scorable is None or self._orders.stopping:
            return
        waiting = asyncio.ensure_future(self._scorable())
        await self._first_of(waiting)
        if not waiting.cancelled():
            waiting.result()

    async def _admit(self) -> experience_pb2.AdmitResponse | None:
        """Permits; None when asking again is better (newer weights are held), or when it is time to stop.

        An admission that is cut off is continued by the next one, so no permit is lost.
        """
        if self._orders.stopping:
            return None
        held = self._receiver.held
        asked = asyncio.ensure_future(self._client.admit(self._room, held.version if held else None, ADMIT_WAIT_S))
        await self._first_of(asked, asyncio.ensure_future(self._receiver.wait_change(held)))
        if asked.cancelled() or not asked.done():
            return None
        answer: experience_pb2.AdmitResponse = asked.result()
        if answer.waiting_for and not self._groups:
            self._activity.now(f"waiting: {answer.waiting_for}")
        return answer

    def _start(self, answer: experience_pb2.AdmitResponse) -> None:
        for permit in answer.permits:
            self._activity.group_started()
            task = asyncio.create_task(self._group(permit))
            self._groups[task] = permit
            task.add_done_callback(self._ended)
        if answer.permits:
            self._activity.now("generating")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._moved.set()
        if not task.cancelled() and task.exception() is not None:
            self._failed.set()  # kept among the groups for `_raise_failure` to find
        else:
            self._groups.pop(task, None)

    # --- one group

    async def _group(self, permit: experience_pb2.Permit) -> None:
        """Produce and ship, or say why not. Only what concerns more than this group is raised."""
        try:
            async with asyncio.timeout(self._group_timeout_s):
                group = await self._produce(permit)
        except TimeoutError:
            return await self._drop(permit, "group_timeout", f"not done after {self._group_timeout_s:g} s")
        except GenerationFailed as error:
            return await self._drop(permit, "generation_failed", str(error))
        except RewardFailed as error:
            return await self._drop(permit, "reward_failed", str(error))
        reason = self._why_filtered(group)
        if reason:
            return await self._client.refund([_filtered(permit, group, reason)])
        try:
            await self._shipper.ship(permit, group)
        except (FrameRefused, FrameError) as error:
            await self._drop(permit, "frame_refused", str(error))

    async def _produce(self, permit: experience_pb2.Permit) -> list[Trajectory]:
        """Generated and scored; whatever comes of it, its slot is free afterwards."""
        try:
            return await self._producer.produce(permit)
        finally:
            self._activity.group_ended()
            self._moved.set()

    async def _drop(self, permit: experience_pb2.Permit, reason: str, detail: str) -> None:
        log.warning("group %d dropped (%s): %s", permit.group_id, reason, detail)
        self._activity.dropped_groups += 1
        await self._client.refund([_refund(permit, reason, again=False)])

    # --- evaluation

    async def _evaluate_unless_stopped(self, ordered: Version) -> None:
        evaluating = asyncio.ensure_future(self._evaluate(ordered))
        await self._first_of(evaluating)
        if not evaluating.cancelled():
            evaluating.result()

    async def _evaluate(self, ordered: Version) -> None:
        """Score the held-out prompts at exactly the held version; groups in flight go on beside it."""
        async with self._receiver.gate:
            held = self._receiver.held
            if held is None or held.version != ordered:
                return log.info("version %s was to be scored, but it is no longer held", ordered)
            self._activity.now(f"evaluating version {ordered}")
            found = await self._examiner.examine(ordered)
            log.info("version %s scores %.3f ± %.3f on %d prompts", ordered, found.score, found.stderr, found.prompts)
            return await self._client.report_eval(found)

    # --- the end

    async def _wind_up(self) -> None:
        """Let what is in flight finish within the grace period; hand the rest to others."""
        if self._orders.finished or not self._groups:
            return
        self._activity.now(f"draining: {self._orders.reason}")
        await asyncio.wait(list(self._groups), timeout=DRAIN_GRACE_S)
        left = dict(self._groups)
        await end(*left)
        if left:
            log.info("handing %d unfinished groups back", len(left))
            async with asyncio.timeout(HAND_BACK_DEADLINE_S):
                await self._client.refund([_refund(permit, "drained", again=True) for permit in left.values()])

    async def _first_of(self, *tasks: asyncio.Future[Any]) -> None:
        """Until one is done, or it is time to stop; then none goes on. Raises what a group must not survive."""
        signals = [asyncio.ensure_future(self._orders.wait()), asyncio.ensure_future(self._failed.wait())]
        try:
            await asyncio.wait([*signals, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(*signals, *tasks)
        for group in list(self._groups):
            if group.done():
                group.result()


def _filtered(permit: experience_pb2.Permit, group: Sequence[Trajectory], reason: str) -> experience_pb2.Refund:
    """A refund that lets the ledger count what was produced for nothing."""
    refund = _refund(permit, reason, again=False)
    refund.trajectories, refund.tokens = len(group), sum(len(member.tokens) for member in group)
    refund.oldest.CopyFrom(min(member.oldest for member in group).to_proto())
    return refund


def _refund(permit: experience_pb2.Permit, reason: str, *, again: bool) -> experience_pb2.Refund:
    return experience_pb2.Refund(group_id=permit.group_id, attempt=permit.attempt, reason=reason, again=again)
