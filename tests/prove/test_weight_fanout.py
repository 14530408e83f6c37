"""Fifty receivers behind two relays: the center sends each version twice. Run with -s to see the figures, as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.buffer.client import BufferClient
from forebay.buffer.relay import Relay, relaying
from forebay.buffer.reservoir import open_reservoir
from forebay.buffer.server import BufferServer, serving
from forebay.config.identity import run_json
from forebay.config.models import RunFile
from forebay.wire.chunker import CHUNK_BYTES
from forebay.wire.host_state import HostState, TensorSpec
from forebay.wire.version import Version
from forebay.wire.weights import Encoded, apply, encode_anchor, encode_delta
from tests.buffer.support import make_run
from tests.faults.proxy import proxied
from tests.wire.making import copy_of

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]

RECEIVERS, BEHIND = 50, 100
ELEMENTS = 3_000_000
SHARE = 0.01  #: of the elements moves a step, by an ULP each, the same ones more often, as in training
RELAYS = ("edge-1", "edge-2")
Counts = dict[tuple[str, str], int]


class Updates:
    """A learner's weights, step after step."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self.state = HostState.allocate([TensorSpec(name="w", dtype="BF16", shape=(ELEMENTS,))])
        self.state.open_for_update("w")[:] = self._rng.integers(0x3A00, 0x3F00, ELEMENTS, np.uint16)
        chance = self._rng.beta(0.08, 4.0, ELEMENTS)
        self._chance = chance * SHARE / chance.mean()
        self.first = copy_of(self.state)

    def anchor(self) -> Encoded:
        """Version 1.0."""
        return encode_anchor(self.state, version=Version(1, 0))

    def next(self, step: int) -> Encoded:
        """The delta to version 1.`step`."""
        moved = copy_of(self.state)
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
        self.moved = asyncio.Event()

    async def follow(self) -> None:
        """Keep up, for ever."""
        held = b""
        async for _ in self.client.watch():
            plan = await self.client.plan(None, held)
            for manifest in plan.path:
                await asyncio.to_thread(apply, self.state, manifest, await self.client.fetch(manifest))
            held = plan.digest
            self.step = plan.version.step
            self.moved.set()

    async def reaches(self, step: int) -> None:
        """Wait for that version."""
        while self.step < step:
            self.moved.clear()
            await self.moved.wait()


async def test_fifty_receivers_behind_two_relays(tmp_path: Path) -> None:
    run = make_run(tmp_path / "center")
    updates = Updates()
    async with serving(open_reservoir(run)) as center, AsyncExitStack() as stack:
        learner = await stack.enter_async_context(_client(center.port))
        await learner.join("learner", "l", "", "", run_json(run))
        relays = [await stack.enter_async_context(_relay(center.port, run, tmp_path / name, name)) for name in RELAYS]
        receivers = await _receivers(stack, relays, updates.state.specs)
        sizes, sends = await _publish_all(learner, center, updates, receivers)
        assert set(sends) == {len(RELAYS)}, "each version crosses each relay's line once"
        digests = {await asyncio.to_thread(receiver.state.digest) for receiver in receivers}
        assert digests == {updates.state.digest()}
        found = _totals(center, relays, sizes) | {
            "behind": await _catch_up(stack, relays[0], updates, sizes),
            "cut": await _cut(center, run, tmp_path / "cut"),
        }
    print(json.dumps({"receivers": RECEIVERS, "relays": len(relays), "sends_per_version": sends[0], **found}))


async def _receivers(stack: AsyncExitStack, relays: list[Relay], specs: list[TensorSpec]) -> list[Receiver]:
    receivers = []
    for number in range(RECEIVERS):
        client = await stack.enter_async_context(_client(relays[number % len(relays)].port))
        receivers.append(Receiver(client, HostState.allocate(specs)))
        task = asyncio.create_task(receivers[-1].follow())
        stack.callback(task.cancel)
    return receivers


async def _publish_all(
    learner: BufferClient, center: BufferServer, updates: Updates, receivers: list[Receiver]
) -> tuple[list[int], list[float]]:
    """Payload bytes of each version, and how often the center sent it."""
    sizes, sends = list[int](), list[float]()
    for step in range(BEHIND + 1):
        encoded = await asyncio.to_thread(updates.next, step) if step else updates.anchor()
        before = _sent(_counts(center))
        await learner.publish(encoded)
        async with asyncio.timeout(120):
            await asyncio.gather(*(receiver.reaches(step) for receiver in receivers))
        sizes.append(encoded.manifest.payload_bytes)
        sends.append((_sent(_counts(center)) - before) / sizes[-1])
    return sizes, sends


def _totals(center: BufferServer, relays: list[Relay], sizes: list[int]) -> dict[str, Any]:
    sent_on = [relay.mirror.traffic.counts["others", "sent"] for relay in relays]
    model_bytes = 2 * ELEMENTS
    return {
        "versions": len(sizes),
        "model_bytes": model_bytes,
        "payload_bytes": sum(sizes),
        "center_sent_bytes": _sent(_counts(center)),
        "relays_sent_bytes": sum(sent_on),
        "center_would_have_sent_bytes": RECEIVERS * sum(sizes),
        "full_copies_bytes": RECEIVERS * len(sizes) * model_bytes,
    }


async def _catch_up(stack: AsyncExitStack, relay: Relay, updates: Updates, sizes: list[int]) -> dict[str, Any]:
    """Somebody who holds the first version takes the cheapest path to the newest, 100 versions on."""
    client = await stack.enter_async_context(_client(relay.port))
    shortcuts = BEHIND // 8 + BEHIND // 64
    async with asyncio.timeout(120):
        while len(relay.mirror.store.manifests) < BEHIND + 1 + shortcuts:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # merged in the background
    late = updates.first
    plan = await client.plan(Version(1, 0), late.digest())
    for manifest in plan.path:
        apply(late, manifest, await client.fetch(manifest))
    assert late.digest() == updates.state.digest()
    path, singles = sum(manifest.payload_bytes for manifest in plan.path), sum(sizes[1:])
    assert path < singles
    return {
        "versions": BEHIND,
        "path": [f"{manifest.base.step}-{manifest.version.step}" for manifest in plan.path],
        "bytes": path,
        "singles_bytes": singles,
        "anchor_bytes": sizes[0],
        "share_of_singles": round(path / singles, 3),
    }


async def _cut(center: BufferServer, run: RunFile, folder: Path) -> dict[str, Any]:
    """A third relay whose line breaks in the middle of the anchor."""
    async with (
        proxied(center.port) as proxy,
        _relay(int(proxy.address.rpartition(":")[2]), run, folder, "cut") as relay,
    ):
        async with asyncio.timeout(60):
            while proxy.line.bytes_down < 3 << 20:  # noqa: ASYNC110
                await asyncio.sleep(0)
            proxy.cut()
            proxy.mend()
            while (newest := relay.mirror.newest()) is None or newest.version.step < BEHIND:  # noqa: ASYNC110
                await asyncio.sleep(0)
        received = relay.mirror.traffic.counts["upstream", "received"]
        repeated = proxy.line.bytes_down - received
        assert repeated <= CHUNK_BYTES, "manifests and at most one chunk beside what arrived"
        return {"received_bytes": received, "line_bytes": proxy.line.bytes_down, "connections": proxy.line.connections}


def _client(port: int) -> BufferClient:
    return BufferClient(f"127.0.0.1:{port}", on_trouble=lambda line: None)


@asynccontextmanager
async def _relay(port: int, run: RunFile, folder: Path, name: str) -> AsyncIterator[Relay]:
    own = run.model_copy(update={"run": run.run.model_copy(update={"folder": folder})})
    async with relaying(own, f"127.0.0.1:{port}", name=name) as relay:
        yield relay


def _counts(center: BufferServer) -> Counts:
    return next(iter(center.tenants)).shelf.traffic.counts


def _sent(counts: Counts) -> int:
    return sum(counts.get((name, "sent"), 0) for name in RELAYS)
