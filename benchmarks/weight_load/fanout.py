"""Receivers behind relays: how often the center sends each version, and whether all end at the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from forebay.buffer.client import BufferClient
from forebay.buffer.relay import Relay, relaying
from forebay.buffer.reservoir import open_reservoir
from forebay.buffer.server import BufferServer, serving
from forebay.config.identity import run_json
from forebay.config.models import RunFile
from forebay.wire.host_state import HostState, TensorSpec
from forebay.wire.version import Version
from forebay.wire.weights import Encoded, apply, encode_anchor, encode_delta

RELAYS = ("edge-1", "edge-2")
ELEMENTS = 3_000_000
SHARE = 0.01  #: of the elements moves a step, by an ULP each, the same ones more often, as in training
REACH_DEADLINE_S = 120.0


class Updates:
    """A learner's weights, step after step."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self.state = HostState.allocate([TensorSpec(name="w", dtype="BF16", shape=(ELEMENTS,))])
        self.state.open_for_update("w")[:] = self._rng.integers(0x3A00, 0x3F00, ELEMENTS, np.uint16)
        chance = self._rng.beta(0.08, 4.0, ELEMENTS)
        self._chance = chance * SHARE / chance.mean()

    def anchor(self) -> Encoded:
        """Version 1.0."""
        return encode_anchor(self.state, version=Version(1, 0))

    def next(self, step: int) -> Encoded:
        """The delta to version 1.`step`."""
        moved = HostState.allocate(self.state.specs)
        moved.copy_from(self.state)
        hit = np.flatnonzero(self._rng.random(ELEMENTS) < self._chance)
        moved.open_for_update("w")[hit] += self._rng.integers(0, 2, len(hit), np.uint16) * np.uint16(2) - np.uint16(1)
        base = Version(1, step - 1)
        encoded = encode_delta(self.state, moved, version=Version(1, step), base_version=base)
        self.state = moved
        return encoded


class Receiver:
    """Holds weights as a sampler does: watches, plans, fetches, applies, proves."""

    def __init__(self, client: BufferClient, state: HostState) -> None:
        self.client, self.state, self.step = client, state, -1
        self._moved = asyncio.Event()

    async def follow(self) -> None:
        """Keep up, for ever."""
        held = b""
        async for _ in self.client.watch():
            plan = await self.client.plan(None, held)
            for manifest in plan.path:
                await asyncio.to_thread(apply, self.state, manifest, await self.client.fetch(manifest))
            held = plan.digest
            self.step = plan.version.step
            self._moved.set()

    async def reaches(self, step: int) -> None:
        """Wait for that version."""
        while self.step < step:
            self._moved.clear()
            await self._moved.wait()


class FanOut:
    """A center, its relays, and their receivers."""

    def __init__(self, run: RunFile, center: BufferServer, learner: BufferClient, stack: AsyncExitStack) -> None:
        self.run, self.center, self.learner, self._stack = run, center, learner, stack
        self.updates = Updates()
        self.relays: list[Relay] = []
        self.receivers: list[Receiver] = []
        self.sizes: list[int] = []  #: payload bytes of each version
        self.sends: list[float] = []  #: how often the center sent each

    @classmethod
    @asynccontextmanager
    async def started(cls, run: RunFile, receivers: int) -> AsyncIterator[FanOut]:
        """All of it, nothing published yet."""
        async with serving(open_reservoir(run)) as center, AsyncExitStack() as stack:
            learner = await stack.enter_async_context(client_of(center.port))
            await learner.join("learner", "l", "", "", run_json(run))
            found = cls(run, center, learner, stack)
            for name in RELAYS:
                folder = run.run.home.parent / name
                found.relays.append(await stack.enter_async_context(relay_of(center.port, run, folder, name)))
            for number in range(receivers):
                await found._receive_from(found.relays[number % len(RELAYS)])
            yield found

    async def publish(self, last_step: int) -> None:
        """An anchor and deltas up to `last_step`, each only when every receiver has the one before."""
        for step in range(last_step + 1):
            encoded = await asyncio.to_thread(self.updates.next, step) if step else self.updates.anchor()
            before = self.sent_bytes()
            await self.learner.publish(encoded)
            async with asyncio.timeout(REACH_DEADLINE_S):
                await asyncio.gather(*(receiver.reaches(step) for receiver in self.receivers))
            self.sizes.append(encoded.manifest.payload_bytes)
            self.sends.append((self.sent_bytes() - before) / self.sizes[-1])

    def sent_bytes(self) -> int:
        """Payload bytes that the center has sent to its relays."""
        counts = next(iter(self.center.tenants)).shelf.traffic.counts
        return sum(counts.get((name, "sent"), 0) for name in RELAYS)

    async def digests_equal(self) -> bool:
        """Whether every receiver's weights are the learner's, by a digest computed anew from their bytes."""
        rotten = [await asyncio.to_thread(receiver.state.recheck) for receiver in self.receivers]
        digests = {receiver.state.digest() for receiver in self.receivers}
        return not any(rotten) and digests == {self.updates.state.digest()}

    async def _receive_from(self, relay: Relay) -> None:
        client = await self._stack.enter_async_context(client_of(relay.port))
        self.receivers.append(Receiver(client, HostState.allocate(self.updates.state.specs)))
        self._stack.callback(asyncio.create_task(self.receivers[-1].follow()).cancel)


def fan_out(folder: Path, receivers: int, versions: int) -> dict[str, Any]:
    """`versions` deltas after an anchor, of a 6 MB model."""
    return asyncio.run(_fan_out(run_in(folder / "center"), receivers, versions))


async def _fan_out(run: RunFile, receivers: int, versions: int) -> dict[str, Any]:
    async with FanOut.started(run, receivers) as found:
        await found.publish(versions)
        return {
            "digests_equal": await found.digests_equal(),
            "center_sends_per_version": round(max(found.sends), 2),
            "receivers": receivers,
            "relays": len(RELAYS),
            **totals(found.sizes, found.sent_bytes(), receivers),
        }


def totals(sizes: Sequence[int], sent_bytes: int, receivers: int) -> dict[str, int]:
    """What the versions weighed, and what full copies to each receiver would have."""
    return {
        "versions": len(sizes),
        "payload_bytes": sum(sizes),
        "center_sent_bytes": sent_bytes,
        "full_copies_bytes": receivers * len(sizes) * 2 * ELEMENTS,
    }


def run_in(folder: Path) -> RunFile:
    """A run that trains nothing, in `folder`, on ports of its own."""
    return RunFile.model_validate(
        {
            "run": {"name": "fan-out", "folder": folder},
            "model": {"path": "none"},
            "task": {"name": "none", "heldout_prompts": 0},
            "buffer": {"listen": "127.0.0.1:0", "http": "127.0.0.1:0"},
        }
    )


def client_of(port: int) -> BufferClient:
    """A client that tells nobody of its troubles."""
    return BufferClient(f"127.0.0.1:{port}", on_trouble=lambda line: None)


@asynccontextmanager
async def relay_of(port: int, run: RunFile, folder: Path, name: str) -> AsyncIterator[Relay]:
    """A relay of the buffer at `port`."""
    own = run.model_copy(update={"run": run.run.model_copy(update={"folder": folder})})
    async with relaying(own, f"127.0.0.1:{port}", name=name) as relay:
        yield relay
