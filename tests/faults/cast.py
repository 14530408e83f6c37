"""The clients of the simulated world: samplers with outboxes, and a learner with checkpoints."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from forebay.buffer.intake import Received
from forebay.config.identity import run_json
from forebay.wire.v1 import common_pb2, control_pb2, experience_pb2
from forebay.wire.version import Version
from tests.buffer.support import anchor, frame_of
from tests.faults.world import World

Answer = experience_pb2.AppendResponse


async def join(world: World, role: common_pb2.Role.ValueType, name: str) -> common_pb2.Member:
    """A member that starts."""
    request = control_pb2.JoinRequest(role=role, id=name, fleet="fleet", region="here", run_json=run_json(world.run))
    return await world.durably(lambda: world.roster.join(request))


@dataclass(slots=True)
class Sampler:
    """Generates with the newest weights it has heard of; its outbox holds what is not acknowledged."""

    world: World
    name: str
    member: common_pb2.Member = field(default_factory=common_pb2.Member)
    in_hand: dict[int, tuple[experience_pb2.Permit, Version]] = field(default_factory=dict)
    outbox: deque[experience_pb2.Frame] = field(default_factory=deque)
    sequence: int = 0
    request: int = 1

    async def start(self) -> None:
        """A new incarnation, which knows nothing of what the old one had not delivered."""
        self.member = await join(self.world, common_pb2.ROLE_SAMPLER, self.name)
        self.in_hand, self.outbox, self.sequence, self.request = {}, deque(), 0, 1

    async def admit(self, wanted: int, held: Version) -> None:
        """The same request until it is answered."""
        request = experience_pb2.AdmitRequest(
            member=self.member, groups=wanted, held=held.to_proto(), request=self.request
        )
        answer = await self.world.durably(lambda: self.world.intake.admit(request))
        self.request += 1
        for permit in answer.permits if answer is not None else ():
            self.in_hand[permit.group_id] = (permit, held)

    def produce(self, most: int) -> None:
        """Put what is in hand into frames of at most `most` groups, each of one version."""
        while self.in_hand:
            version = next(iter(self.in_hand.values()))[1]
            chosen = [permit for permit, held in self.in_hand.values() if held == version][:most]
            for permit in chosen:
                del self.in_hand[permit.group_id]
            self.outbox.append(frame_of(self.member, self.sequence, chosen, version))
            self.sequence += 1

    async def deliver(self) -> None:
        """Send the outbox, all of it at once, until every frame is answered."""
        while self.outbox:
            frames = list(self.outbox)
            answers = await self.world.durably(lambda frames=frames: [self._send(frame) for frame in frames])  # type: ignore[misc]
            for frame, answer in zip(frames, answers, strict=True):
                self._take(frame, answer)

    def _send(self, frame: experience_pb2.Frame) -> Answer:
        return self.world.intake.append(self.member, Received.of(frame))

    def _take(self, frame: experience_pb2.Frame, answer: Answer) -> None:
        assert answer.outcome in (Answer.STORED, Answer.DUPLICATE), answer
        self.world.history.acknowledged(frame)
        self.outbox.popleft()

    async def refund(self, *, again: bool) -> None:
        """Give one permit back."""
        if self.in_hand:
            permit, _ = self.in_hand.popitem()[1]
            refund = experience_pb2.Refund(
                group_id=permit.group_id, attempt=permit.attempt, reason="generation_failed", again=again
            )
            request = experience_pb2.RefundRequest(member=self.member, refunds=[refund])
            await self.world.durably(lambda: self.world.intake.refund(request))


@dataclass(slots=True)
class Learner:
    """Its weights are the groups they were trained with, in order; so are its checkpoints."""

    world: World
    member: common_pb2.Member = field(default_factory=common_pb2.Member)
    weights: tuple[int, ...] = ()
    step: int = 0
    checkpoints: dict[int, tuple[int, ...]] = field(default_factory=lambda: {0: ()})
    newest: Version = field(default_factory=lambda: Version(0, 0))
    restarts: int = 0

    async def start(self, back: int = 0) -> None:
        """A new process, from the newest checkpoint or one of those that the buffer can still go back to."""
        self.restarts += 1
        kept = sorted(self.checkpoints)
        self.step = kept[max(0, len(kept) - 1 - back)]
        self.weights = self.checkpoints[self.step]
        self.checkpoints = {step: weights for step, weights in self.checkpoints.items() if step <= self.step}
        self.member = await join(self.world, common_pb2.ROLE_LEARNER, "learner")
        if self.step > self.world.reservoir.state.committed:  # died between the checkpoint and its commit
            await self._commit(self.step)
        request = experience_pb2.RewindRequest(member=self.member, checkpoint_step=self.step)
        await self.world.durably(lambda: self.world.outlet.rewind(request))
        self.world.history.rewound(self.step)
        await self.publish()

    async def lease(self) -> tuple[int, ...]:
        """The batch of the next step; empty while there is none."""
        request = experience_pb2.LeaseRequest(member=self.member, step=self.step + 1)
        batch = await self.world.durably(lambda: self.world.outlet.lease(request))
        if batch is not None:
            self.world.history.leased(self.step + 1, batch.group_ids)
        return batch.group_ids if batch is not None else ()

    def train(self, groups: tuple[int, ...], *, checkpoint: bool) -> None:
        """A step, and maybe its checkpoint."""
        self.weights, self.step = (*self.weights, *groups), self.step + 1
        if checkpoint:
            self.checkpoints[self.step] = self.weights
            for old in sorted(self.checkpoints)[: -self.world.run.learner.keep_checkpoints]:
                del self.checkpoints[old]

    async def commit(self) -> None:
        """The step is done."""
        await self._commit(max(self.checkpoints))

    async def publish(self) -> None:
        """These weights, chunks first."""
        version = Version(self.member.incarnation, self.step)
        encoded = anchor(version, self.step)

        async def attempt() -> None:
            for digest, data in encoded.chunks.items():
                self.world.reservoir.store.put_chunk(digest, data)
            if self.world.shelf.check(self.member, encoded.manifest):
                await self.world.shelf.publish(self.member, encoded.manifest)

        await self.world.ask(attempt)
        self.newest = version

    async def _commit(self, checkpoint: int) -> None:
        request = experience_pb2.CommitRequest(
            member=self.member, step=self.step, checkpoint_step=checkpoint, metrics_json="{}"
        )
        await self.world.durably(lambda: self.world.outlet.commit(request))
        self.world.history.committed(self.step)
