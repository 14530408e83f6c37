"""Weights arrive exactly, by the cheapest way that works, and failures leave what was there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forebay.buffer.client import BufferClient
from forebay.config.models import RunFile
from forebay.sampler import receiver
from forebay.sampler.activity import Activity
from forebay.sampler.beside import end
from forebay.sampler.receiver import WeightReceiver
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version
from forebay.wire.weights import HostState
from tests.sampler.support import (
    Learner,
    RecordingEngine,
    base_state,
    buffer_with_learner,
    nudged,
    sampler_client,
    soon,
)


class CountingClient:
    """The real client, counting payload bytes; `damage` spoils the next payloads."""

    def __init__(self, client: BufferClient) -> None:
        self._client, self.fetched_bytes, self.damage, self.anchors = client, 0, 0, 0
        self.watch, self.plan = client.watch, client.plan

    async def fetch(self, manifest: weights_pb2.Manifest) -> bytes:
        payload = await self._client.fetch(manifest)
        self.fetched_bytes += len(payload)
        self.anchors += manifest.anchor
        if self.damage:
            self.damage -= 1
            return payload[:-1] + bytes([payload[-1] ^ 1])
        return payload


@pytest.fixture
def run(run_file: RunFile, tmp_path: Path) -> RunFile:
    return run_file.model_copy(update={"run": run_file.run.model_copy(update={"folder": tmp_path})})


class Bench:
    """A receiver on a real buffer, with an engine that remembers."""

    def __init__(self, learner: Learner, client: CountingClient, receiver: WeightReceiver, activity: Activity) -> None:
        self.learner, self.client, self.receiver, self.activity = learner, client, receiver, activity
        self.engine = RecordingEngine()

    async def ready(self) -> None:
        await self.receiver.prove()
        await self.receiver.hand_over(self.engine)  # type: ignore[arg-type]

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.receiver.follow(self.engine))  # type: ignore[arg-type]
        yield
        await end(task)

    async def holds(self, version: Version) -> None:
        await soon(lambda: self.receiver.held is not None and self.receiver.held.version == version)


@pytest.fixture
async def bench(run: RunFile, checkpoint: Path) -> AsyncIterator[Bench]:
    async with buffer_with_learner(run) as (server, learner), sampler_client(server, run) as client:
        counting, activity = CountingClient(client), Activity()
        receiver = WeightReceiver(counting, checkpoint, "F32", activity)  # type: ignore[arg-type]
        watching = asyncio.create_task(receiver.watch())
        yield Bench(learner, counting, receiver, activity)
        await end(watching)
        receiver.close()


async def test_same_checkpoint_costs_no_bytes_and_no_install(bench: Bench, checkpoint: Path) -> None:
    version = await bench.learner.publish(0, base_state(checkpoint))
    await bench.ready()
    assert bench.client.fetched_bytes == 0
    assert bench.engine.installed == [("adopt", str(version), base_state(checkpoint).digest())]
    assert bench.receiver.held is not None
    assert bench.receiver.held.version == version


async def test_other_weights_are_fetched_and_installed_before_the_first_permit(bench: Bench, checkpoint: Path) -> None:
    newest = nudged(base_state(checkpoint), 1)
    version = await bench.learner.publish(0, newest)
    await bench.ready()
    assert bench.client.fetched_bytes > 0
    assert bench.engine.installed == [("install", str(version), newest.digest())]


async def test_checkpoint_of_another_dtype_is_installed(run: RunFile, checkpoint: Path, bench: Bench) -> None:
    bench.receiver._dtype = "BF16"
    rounded = base_state(checkpoint, "BF16")
    version = await bench.learner.publish(0, rounded)
    await bench.ready()
    assert bench.client.fetched_bytes == 0
    assert bench.engine.installed == [("install", str(version), rounded.digest())]


async def test_deltas_bring_each_version_exactly(bench: Bench, checkpoint: Path) -> None:
    state = base_state(checkpoint)
    await bench.learner.publish(0, state)
    await bench.ready()
    async with bench.following():
        for step in range(1, 4):
            state = nudged(state, step)
            await bench.holds(await bench.learner.publish(step, state))
            assert bench.receiver.held is not None
            assert bench.receiver.held.digest == state.digest()
            assert bench.engine.installed[-1][2] == state.digest()
    assert bench.client.anchors == 0
    assert bench.activity.installs == 3


async def test_overtaken_versions_are_skipped(bench: Bench, checkpoint: Path) -> None:
    state = base_state(checkpoint)
    await bench.learner.publish(0, state)
    await bench.ready()
    async with bench.following():
        async with bench.receiver.gate:  # an evaluation, say
            for step in range(1, 5):
                state = nudged(state, step)
                last = await bench.learner.publish(step, state)
        await bench.holds(last)
    assert bench.activity.installs <= 2
    assert bench.engine.installed[-1][2] == state.digest()


@pytest.mark.parametrize("damaged", [1, 2])
async def test_damaged_payload_is_never_installed(bench: Bench, checkpoint: Path, damaged: int) -> None:
    state = base_state(checkpoint)
    await bench.learner.publish(0, state)
    await bench.ready()
    bench.client.damage = damaged
    async with bench.following():
        state = nudged(state, 1)
        await bench.holds(await bench.learner.publish(1, state))
    assert bench.activity.replans == 1
    assert {digest for _, _, digest in bench.engine.installed} == {base_state(checkpoint).digest(), state.digest()}


async def test_failed_install_keeps_the_version_and_is_tried_again(bench: Bench, checkpoint: Path) -> None:
    state = base_state(checkpoint)
    first = await bench.learner.publish(0, state)
    await bench.ready()
    bench.engine.failures = 1
    async with bench.following():
        state = nudged(state, 1)
        second = await bench.learner.publish(1, state)
        await soon(lambda: bench.activity.failed_installs == 1)
        assert bench.receiver.held is not None
        assert bench.receiver.held.version == first
        await bench.holds(second)
    assert bench.receiver.held.digest == state.digest()


async def test_same_weights_of_a_resumed_learner_are_renamed_without_a_pause(
    bench: Bench, run: RunFile, checkpoint: Path
) -> None:
    state = base_state(checkpoint)
    await bench.learner.publish(0, state)
    await bench.ready()
    async with bench.following():
        address = bench.learner.client._link.address
        async with BufferClient(address) as client:
            from forebay.config.identity import run_json

            joined = await client.join("learner", "learner", "local", "local", run_json(run))
            await client.rewind(0)
            resumed = Learner(client, joined.member.incarnation)
            version = await resumed.publish(0, state)
            await bench.holds(version)
    assert version.incarnation > bench.learner.incarnation
    assert [how for how, _, _ in bench.engine.installed] == ["adopt", "adopt"]


async def test_waiting_for_the_first_weights_has_a_name(bench: Bench, checkpoint: Path) -> None:
    proving = asyncio.create_task(bench.receiver.prove())
    await soon(lambda: bench.activity.doing == "waiting: learner to publish the first weights")
    await bench.learner.publish(0, base_state(checkpoint))
    await proving


async def test_an_anchor_of_other_tensors_leaves_what_serves_whole(bench: Bench, checkpoint: Path) -> None:
    """The engine refuses it, as one that misses a tensor; the version before it must be there to be put back."""
    state = base_state(checkpoint)
    first = await bench.learner.publish(0, state)
    await bench.ready()
    other = HostState.allocate(state.specs[1:])
    bench.engine.failures = 1
    async with bench.following():
        await bench.learner.publish(1, other)
        await soon(lambda: bench.activity.failed_installs == 1)
        assert bench.receiver.held is not None
        assert bench.receiver.held.version == first


async def test_memory_that_rots_is_found_and_healed_by_an_anchor(
    bench: Bench, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "RECHECK_EVERY_INSTALLS", 1)
    monkeypatch.setattr(RecordingEngine, "_check", staticmethod(lambda copy: None))  # an engine reads without looking
    state = base_state(checkpoint)
    await bench.learner.publish(0, state)
    await bench.ready()
    async with bench.following():
        held = bench.receiver._host.state
        held._bytes(held.names[0])[-1] ^= 128  # an update moves elements by steps, so the bit stays wrong
        state = nudged(state, 1)
        await bench.learner.publish(1, state)
        await soon(lambda: bench.activity.installs == 1 and held.damaged)
        state = nudged(state, 2)
        await bench.holds(await bench.learner.publish(2, state))
        assert bench.client.anchors > 0
        assert bench.receiver._host.state.recheck() == []
        assert bench.engine.installed[-1][2] == state.digest()
