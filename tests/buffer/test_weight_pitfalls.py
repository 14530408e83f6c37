"""What went wrong in other systems between learner, store and receiver, one test each: the issue stands above it.

Those of the codec alone are in tests/wire/test_weight_pitfalls.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from forebay.buffer.weight_place import LocalPlace
from forebay.buffer.weight_plan import cheapest_path
from forebay.buffer.weight_store import PLAN_GOOD_FOR_S
from forebay.learner.publisher import Publisher
from forebay.wire.version import Version
from forebay.wire.weights import HostState, WrongBase, apply, encode_anchor, encode_delta
from tests.buffer.conftest import Serve
from tests.buffer.support import FakeClock, UnsyncedDisk, weights
from tests.buffer.test_weights import install, lineage, stored
from tests.learner.fake_buffer import FakeBuffer


# THUDM/slime#2104: the sender's base moved on although the update had not arrived, and all later ones were off.
def test_a_publication_that_fails_leaves_no_drift() -> None:
    buffer, states = FakeBuffer(lambda step: []), [weights(0)]
    ours = Publisher(buffer, states[0].specs, incarnation=1, anchor_every=100)
    for step in range(6):
        states.append(HostState.allocate(states[0].specs))
        states[-1].bits_of("w")[:] = states[-2].view_of("w")
        states[-1].bits_of("w")[step::50] += 1
        buffer.fail_publish = [step in (2, 4)]
        ours.offer(step, partial(_fill, states[-1]))
        assert ours.wait_stored(30)
        assert buffer.newest_weights().digest() == states[-1].digest()
    assert buffer.versions == ["1.0 anchor", "1.1", "1.2 anchor", "1.3", "1.4 anchor", "1.5"]
    assert ours.close(30)


def _fill(state: HostState, target: HostState) -> None:
    target.copy_from(state)


# PrimeIntellect-ai/prime-rl#1348, #3386: the mark that weights are there was written before they were.
def test_a_version_is_named_only_after_all_that_it_names(tmp_path: Path) -> None:
    class Watched(LocalPlace):
        def put(self, name: str, data: bytes) -> None:
            super().put(name, data)
            order.append(name)

    order: list[str] = []
    [encoded] = lineage(0, anchors=set())[0]
    store = stored(tmp_path, [], FakeClock())
    store.place = Watched(tmp_path, UnsyncedDisk())
    with pytest.raises(Exception, match="lacks 1 of its 1 chunks"):
        store.put_manifest(encoded.manifest)
    assert not order
    for digest, data in encoded.chunks.items():
        store.put_chunk(digest, data)
    store.put_manifest(encoded.manifest)
    assert [name.partition("/")[0] for name in order] == ["chunks", "manifests"]


# NovaSky-AI/SkyRL#1902: a chain of which the beginning was deleted was replayed onto the first version.
async def test_who_holds_what_was_deleted_starts_from_an_anchor(serve: Serve) -> None:
    versions, states = lineage(6, anchors={3, 5})
    async with serve(buffer={"keep_anchors": 1}) as served, served.client() as client:
        await client.join("learner", "l", "", "", served.reservoir.state.run_json)
        for encoded in versions:
            served.clock.now += PLAN_GOOD_FOR_S + 1
            await client.publish(encoded)
        store = served.reservoir.store
        assert min(key.version.step for key in store.manifests) == 5
        plan = await client.plan(Version(1, 0), states[0].digest())
        assert [(manifest.version.step, manifest.anchor) for manifest in plan.path] == [(5, True), (6, False)]
        assert (await install(client, weights(0))).digest() == states[6].digest()
        with pytest.raises(WrongBase, match=r"1\.6 is for 1\.5"):  # and who took such a chain by himself is stopped
            apply(states[0], versions[6].manifest, versions[6].payload())
        assert states[0].digest() == weights(0).digest()


# MoonshotAI/checkpoint-engine#106: the same weights once more found what the first time had left, and nobody moved.
async def test_weights_that_come_back_are_a_version_of_their_own(serve: Serve) -> None:
    first, second = weights(0), weights(1)
    there = encode_delta(first, second, version=Version(1, 1), base_version=Version(1, 0))
    back = encode_delta(second, first, version=Version(1, 2), base_version=Version(1, 1))
    again = encode_delta(first, second, version=Version(1, 3), base_version=Version(1, 2))
    async with serve() as served, served.client() as client:
        await client.join("learner", "l", "", "", served.reservoir.state.run_json)
        await client.publish(encode_anchor(first, version=Version(1, 0)))
        announced, receiver = client.watch(), await install(client, None)
        assert Version.from_proto((await anext(announced)).version) == Version(1, 0)
        for encoded, weights_now in ((there, second), (back, first), (again, second)):
            await client.publish(encoded)
            assert (await anext(announced)).version == encoded.manifest.version
            receiver = await install(client, receiver)
            assert receiver.digest() == weights_now.digest()
        assert await client.publish(again) == 0


# grail: the anchor was deleted that living deltas stood on.
def test_an_anchor_that_deltas_need_is_not_deleted(tmp_path: Path) -> None:
    versions, states = lineage(9, anchors={4})
    clock = FakeClock()
    store = stored(tmp_path, versions, clock)
    clock.now += PLAN_GOOD_FOR_S + 1
    store._keep_anchors = 1
    store.collect([Version(1, step) for step in range(10)])
    for step in range(4, 10):
        path = cheapest_path(store.manifests.values(), b"", states[step].digest())
        assert path is not None
        at = HostState.allocate(states[0].specs)
        for manifest in path:
            apply(at, manifest, b"".join(store.read_chunk(chunk.digest) for chunk in manifest.chunks))
        assert at.digest() == states[step].digest()


# NVIDIA-NeMo/RL#2444: what was queued before an update failed was sent after it, on a base that nobody had.
async def test_a_delta_on_a_base_that_was_never_stored_is_refused(serve: Serve) -> None:
    versions, states = lineage(3, anchors=set())
    async with serve() as served, served.client() as client:
        await client.join("learner", "l", "", "", served.reservoir.state.run_json)
        await client.publish(versions[0])
        for late in versions[2:]:
            with pytest.raises(Exception, match="publish an anchor"):
                await client.publish(late)
        assert served.reservoir.state.newest == Version(1, 0)
        assert (await install(client, None)).digest() == states[0].digest()
