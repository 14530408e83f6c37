"""Versions are published whole or not at all, reached by the cheapest path, deleted when no plan needs them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.buffer.async_client import _publication
from forebay.buffer.client import BufferClient, PlanOutdated, Refused, WeightsDamaged
from forebay.buffer.errors import CallRefused
from forebay.buffer.weight_key import Key
from forebay.buffer.weight_merger import Merger
from forebay.buffer.weight_plan import MAX_PATH_BYTES, cheapest_path, first_part, wants_anchor
from forebay.buffer.weight_store import PLAN_GOOD_FOR_S, WeightStore
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version
from forebay.wire.weights import Encoded, HostState, apply, encode_anchor, encode_delta
from tests.buffer.conftest import Serve
from tests.buffer.support import FakeClock, UnsyncedDisk, anchor, join_learner, join_sampler, weights


def lineage(steps: int, *, anchors: set[int]) -> tuple[list[Encoded], list[HostState]]:
    """Versions 1.0 … 1.steps, each a few elements away from the one before."""
    states, versions = [weights(0)], [encode_anchor(weights(0), version=Version(1, 0))]
    for step in range(1, steps + 1):
        state = HostState.allocate(states[-1].specs)
        state.copy_from(states[-1])
        state.bits_of("w")[step * 7 : step * 7 + 5] += 1
        fresh = HostState.allocate(state.specs)
        fresh.bits_of("w")[:] = state.bits_of("w")
        version, base = Version(1, step), Version(1, step - 1)
        if step in anchors:
            versions.append(encode_anchor(fresh, version=version))
        else:
            versions.append(encode_delta(states[-1], fresh, version=version, base_version=base))
        states.append(fresh)
    return versions, states


async def install(client: BufferClient, state: HostState | None) -> HostState:
    """What a sampler does: plan, fetch, apply."""
    plan = await client.plan(None, state.digest() if state else b"")
    for manifest in plan.path:
        payload = await client.fetch(manifest)
        state = state if state is not None else HostState.allocate(weights(0).specs)
        apply(state, manifest, payload)
    assert state is not None
    assert state.digest() == plan.digest
    return state


async def test_publish_watch_plan_fetch(serve: Serve) -> None:
    versions, states = lineage(3, anchors=set())
    async with serve() as served, served.client() as learner, served.client() as sampler:
        await learner.join("learner", "l", "", "", served.reservoir.state.run_json)
        assert await learner.publish(versions[0]) == versions[0].manifest.payload_bytes
        assert await learner.publish(versions[0]) == 0
        announcements = sampler.watch()
        assert Version.from_proto((await anext(announcements)).version) == Version(1, 0)
        state = await install(sampler, None)
        for step in (1, 2, 3):
            await learner.publish(versions[step])
        late = await install(sampler, None)
        assert late.digest() == states[3].digest()
        plan = await sampler.plan(Version(1, 0), state.digest())
        assert [manifest.version.step for manifest in plan.path] == [1, 2, 3]
        assert (await install(sampler, state)).digest() == states[3].digest()
        assert not (await sampler.plan(Version(1, 3), states[3].digest())).path
        seen = [Version.from_proto((await anext(announcements)).version).step]
        assert seen[-1] in (1, 2, 3)
    async with serve() as served, served.client() as sampler:
        assert (await install(sampler, None)).digest() == states[3].digest()


async def test_publications_that_must_not_be(serve: Serve) -> None:
    versions, _ = lineage(2, anchors=set())
    async with serve() as served, served.client() as learner:
        member = await join_learner(learner, served.run)
        assert member.incarnation == 1
        with pytest.raises(Refused, match="other weights"):
            await learner.publish(anchor(Version(1, 0), seed=5))
        with pytest.raises(Refused, match="incarnation 1's to publish"):
            await learner.publish(anchor(Version(2, 1)))
        with pytest.raises(Refused, match="publish an anchor"):
            await learner.publish(versions[2])
        await learner.publish(versions[1])
        assert served.reservoir.state.newest == Version(1, 1)


async def test_a_cut_publication_leaves_nothing_visible_and_resumes(serve: Serve) -> None:
    encoded = anchor(Version(1, 0))
    async with serve() as served, served.client() as learner:
        member = (await learner.join("learner", "l", "", "", served.reservoir.state.run_json)).member
        empty = _publication(member, encoded.manifest, [], {})
        with pytest.raises(Exception, match="lacks 1 of its 1 chunks"):
            await learner._weights.Publish(empty)
        wrong = dict.fromkeys(encoded.chunks, b"x" * encoded.manifest.payload_bytes)
        with pytest.raises(Exception, match="does not match its digest"):
            await learner._weights.Publish(_publication(member, encoded.manifest, list(encoded.chunks), wrong))
        assert served.reservoir.state.newest is None
        with pytest.raises(Refused, match="no weights are published yet"):
            await learner.plan(None, b"")
        served.reservoir.store.put_chunk(*next(iter(encoded.chunks.items())))
        assert await learner.publish(encoded) == 0
        assert served.reservoir.state.newest == Version(1, 0)


async def test_void_versions_are_not_planned(serve: Serve) -> None:
    versions, states = lineage(1, anchors=set())
    async with serve() as served, served.client() as first, served.client() as second:
        await join_learner(first, served.run)
        await first.publish(versions[1])
        joined = await second.join("learner", "l", "", "", served.reservoir.state.run_json)
        await second.rewind(0)
        assert served.reservoir.state.newest == Version(1, 0)
        await second.publish(anchor(Version(joined.member.incarnation, 0)))
        plan = await second.plan(Version(1, 1), states[1].digest())
        assert [(manifest.anchor, manifest.version.incarnation) for manifest in plan.path] in ([(True, 2)], [(True, 1)])
        held = await second.plan(Version(1, 0), states[0].digest())
        assert Version.from_proto(held.version) == Version(2, 0)
        assert not held.path


async def test_fetch_goes_on_after_a_cut_and_checks_every_chunk(serve: Serve) -> None:
    encoded = anchor(Version(1, 0))
    chunk = encoded.manifest.chunks[0]
    async with serve() as served, served.client() as client:
        await join_learner(client, served.run)
        begun = bytearray(encoded.chunks[chunk.digest][:100])
        fetcher = client._fetcher
        await fetcher._read(client._weights, client.member, chunk, begun)
        assert bytes(begun) == encoded.chunks[chunk.digest]
        path = served.reservoir.store.folder / "chunks" / chunk.digest.hex()
        path.write_bytes(bytes(chunk.bytes))
        with pytest.raises(WeightsDamaged, match="does not match its digest after 3 tries"):
            await client.fetch(encoded.manifest)
        lost = weights_pb2.Manifest(chunks=[weights_pb2.Chunk(digest=bytes(32), bytes=5)])
        with pytest.raises(PlanOutdated, match="make a new plan"):
            await client.fetch(lost)


def stored(folder: Path, versions: list[Encoded], clock: FakeClock) -> WeightStore:
    store = WeightStore(folder, disk=UnsyncedDisk(), keep_anchors=2, clock=clock)
    for encoded in versions:
        for digest, data in encoded.chunks.items():
            store.put_chunk(digest, data)
        store.put_manifest(encoded.manifest)
    return store


def test_collection_keeps_what_is_needed(tmp_path: Path) -> None:
    versions, states = lineage(7, anchors={3, 6})
    clock = FakeClock()
    store = stored(tmp_path, versions, clock)
    valid = [Version(1, step) for step in range(8)]
    store.pin([versions[1].manifest])
    assert store.collect(valid) == [Version(1, 0), Version(1, 2)]
    clock.now += PLAN_GOOD_FOR_S + 1
    before = store.disk_bytes
    assert store.collect(valid) == [Version(1, 1)]
    assert store.disk_bytes < before
    kept = {path.name for path in (tmp_path / "chunks").iterdir()}
    assert kept == {chunk.digest.hex() for m in store.manifests.values() for chunk in m.chunks}
    path = cheapest_path(store.manifests.values(), b"", states[7].digest())
    assert path is not None
    assert [manifest.version.step for manifest in path] == [6, 7]
    again = WeightStore(tmp_path, disk=UnsyncedDisk(), clock=clock)
    assert again.manifests == store.manifests
    assert again.disk_bytes == store.disk_bytes


def test_the_only_good_anchor_is_never_deleted(tmp_path: Path) -> None:
    versions, _ = lineage(2, anchors=set())
    store = stored(tmp_path, versions, FakeClock())
    assert store.collect([Version(1, 0), Version(1, 1), Version(1, 2)]) == []
    assert store.collect([Version(1, 0)]) == [Version(1, 1), Version(1, 2)]
    assert store.collect([]) == []


def test_a_chunk_that_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    with pytest.raises(CallRefused, match="does not match its digest"):
        store.put_chunk(bytes(32), b"data")
    assert list((tmp_path / "chunks").iterdir()) == []


@given(seed=st.integers(0, 10_000))
def test_the_cheapest_path_is_cheapest(seed: int) -> None:
    rng = random.Random(seed)
    names = [bytes([65 + i]) for i in range(6)]
    edges = []
    for number in range(rng.randrange(1, 14)):
        is_anchor = rng.random() < 0.3
        edges.append(
            weights_pb2.Manifest(
                version=Version(1, number).to_proto(),
                anchor=is_anchor,
                base_digest=b"" if is_anchor else rng.choice(names),
                digest=rng.choice(names),
                payload_bytes=rng.randrange(1, 50),
            )
        )
    held, target = rng.choice([b"", *names]), rng.choice(names)
    path = cheapest_path(edges, held, target)
    costs: dict[bytes, float] = {held: 0.0, b"": 0.0}
    for _ in names:
        for edge in edges:
            start = costs.get(b"" if edge.anchor else edge.base_digest, float("inf"))
            costs[edge.digest] = min(costs.get(edge.digest, float("inf")), start + edge.payload_bytes)
    expected: Any = costs.get(target, float("inf"))
    assert (sum(edge.payload_bytes for edge in path) if path is not None else float("inf")) == expected
    if path:
        assert path[0].anchor or path[0].base_digest == held
        assert path[-1].digest == target


def merged(store: WeightStore, newest: int, lengths: tuple[int, ...] = (2, 4)) -> list[tuple[int, int]]:
    """What a merger makes, as steps (from, to)."""
    made = Merger(store, lengths, lambda: False).work(Version(1, newest))
    return [(key.base.step, key.version.step) for key in made if key.base]


def replayed(store: WeightStore, state: HostState, target: HostState) -> list[weights_pb2.Manifest]:
    """The cheapest path from one state to the other, applied and proved."""
    path = cheapest_path(store.manifests.values(), state.digest(), target.digest())
    assert path is not None
    at = HostState.allocate(state.specs)
    at.copy_from(state)
    for manifest in path:
        apply(at, manifest, b"".join(store.read_chunk(chunk.digest) for chunk in manifest.chunks))
    assert at.digest() == target.digest()
    return path


def test_shortcuts_join_one_another_and_are_found_again(tmp_path: Path) -> None:
    versions, states = lineage(11, anchors={1})
    store = stored(tmp_path, versions, FakeClock())
    assert merged(store, 11) == [(1, 3), (3, 5), (5, 7), (7, 9), (9, 11), (1, 5), (5, 9)]
    assert merged(store, 11) == []
    path = replayed(store, states[2], states[11])
    assert [manifest.version.step for manifest in path] == [3, 5, 9, 11]
    singles = sum(versions[step].manifest.payload_bytes for step in range(3, 12))
    assert sum(manifest.payload_bytes for manifest in path) < singles
    again = WeightStore(tmp_path, disk=UnsyncedDisk(), clock=FakeClock())
    assert again.manifests == store.manifests
    assert replayed(again, states[1], states[10])[0].version.step == 5


def test_shortcuts_go_with_their_ends_unless_a_reader_holds_them(tmp_path: Path) -> None:
    versions, _ = lineage(7, anchors={4, 6})
    clock = FakeClock()
    store = stored(tmp_path, versions, clock)
    assert merged(store, 3) == [(0, 2)]
    clock.now += PLAN_GOOD_FOR_S + 1  # merging pins its own sources
    shortcut = Key(Version(1, 2), Version(1, 0))
    store.pin([store.manifests[shortcut]])
    valid = [Version(1, step) for step in range(8)]
    assert store.collect(valid) == [Version(1, step) for step in range(4)]
    assert shortcut in store.manifests
    assert not store.missing(store.manifests[shortcut].chunks)
    clock.now += PLAN_GOOD_FOR_S + 1
    store.collect(valid)
    assert shortcut not in store.manifests
    store.put_merged(versions[2])  # its ends are gone: nothing is stored
    assert all(key.base is None for key in store.manifests)


def test_a_merge_stops_with_the_buffer(tmp_path: Path) -> None:
    versions, _ = lineage(4, anchors=set())
    store = stored(tmp_path, versions, FakeClock())
    assert Merger(store, (2,), lambda: True).work(Version(1, 4)) == []
    assert len(store.manifests) == 5


async def test_the_buffer_merges_after_publications(serve: Serve) -> None:
    versions, states = lineage(17, anchors=set())
    async with serve() as served, served.client() as learner:
        await learner.join("learner", "l", "", "", served.reservoir.state.run_json)
        shelf = next(iter(served.server.tenants)).shelf
        for encoded in versions:
            await learner.publish(encoded)
        while len(served.reservoir.store.manifests) < 20:
            assert shelf._merging is not None
            await shelf._merging
            shelf._merge(Version(1, 17))
        path = (await learner.plan(Version(1, 0), states[0].digest())).path
        assert [manifest.version.step for manifest in path] == [8, 16, 17]
        assert (await install(learner, states[0])).digest() == states[17].digest()


async def test_who_must_begin_with_an_old_anchor_asks_for_a_new_one(serve: Serve) -> None:
    states, chain = [weights(0, elements=500)], []
    for step in range(1, 4):  # deltas as big as the anchor
        states.append(weights(step, elements=500))
        chain.append(encode_delta(states[-2], states[-1], version=Version(1, step), base_version=Version(1, step - 1)))
    async with serve() as served, served.client() as learner, served.client() as sampler:
        await learner.join("learner", "l", "", "", served.reservoir.state.run_json)
        await learner.publish(encode_anchor(states[0], version=Version(1, 0)))
        await learner.publish(chain[0])
        await sampler.plan(Version(1, 0), states[0].digest())
        await learner.publish(chain[1])
        assert not learner.anchor_wanted, "nobody had to begin with the anchor"
        await sampler.plan(None, b"")
        await learner.publish(chain[2])
        assert learner.anchor_wanted
        await learner.publish(encode_anchor(weights(9, elements=500), version=Version(1, 4)))
        assert not learner.anchor_wanted
        await sampler.plan(Version(7, 7), b"unreachable".ljust(32))
        assert not next(iter(served.server.tenants)).shelf.anchor_wanted, "the new anchor alone is the path"


def test_when_an_anchor_is_wanted() -> None:
    anchor_of = weights_pb2.Manifest(anchor=True, payload_bytes=100)
    assert not wants_anchor([])
    assert not wants_anchor([anchor_of, weights_pb2.Manifest(payload_bytes=50)])
    assert wants_anchor([anchor_of, weights_pb2.Manifest(payload_bytes=51)])
    assert not wants_anchor([weights_pb2.Manifest(payload_bytes=51), weights_pb2.Manifest(payload_bytes=510)])


def test_a_long_path_is_told_in_parts() -> None:
    wide = [weights_pb2.Manifest(base_digest=bytes(MAX_PATH_BYTES // 3)) for _ in range(4)]
    assert first_part(wide) == wide[:2]
    assert first_part(wide[:1] * 2) == wide[:1] * 2
    huge = weights_pb2.Manifest(base_digest=bytes(MAX_PATH_BYTES + 1))
    assert first_part([huge, huge]) == [huge]


def test_a_damaged_anchor_does_not_count(tmp_path: Path) -> None:
    versions, states = lineage(6, anchors={2, 4, 6})
    store = stored(tmp_path, versions, FakeClock())
    chunk = tmp_path / "chunks" / versions[6].manifest.chunks[0].digest.hex()
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    valid = [Version(1, step) for step in range(7)]
    assert store.collect(valid) == [Version(1, 0), Version(1, 1)], "2 and 4 are the two newest whole ones"
    chunk.unlink()
    assert store.collect(valid) == []
    assert replayed(store, states[2], states[5])


async def test_what_live_members_hold_keeps_its_way(serve: Serve) -> None:
    """A sampler that fell behind two anchors goes on by deltas; once it is lost, they go."""
    versions, states = lineage(3, anchors=set())
    rest = [encode_anchor(states[3], version=Version(1, step)) for step in (4, 5, 6)]
    async with serve() as served, served.client() as learner, served.client() as sampler:
        await learner.join("learner", "l", "", "", served.reservoir.state.run_json)
        for encoded in versions:
            await learner.publish(encoded)
        await join_sampler(sampler, served.run)
        await sampler.heartbeat("generating", 0.0, Version(1, 0), states[0].digest(), {})
        for encoded in rest[:2]:
            served.clock.now += PLAN_GOOD_FOR_S
            await sampler.heartbeat("generating", 0.0, Version(1, 0), states[0].digest(), {})
            await learner.publish(encoded)
        plan = await sampler.plan(Version(1, 0), states[0].digest())
        assert [manifest.version.step for manifest in plan.path] == [1, 2, 3]
        served.clock.now += PLAN_GOOD_FOR_S + served.run.buffer.member_timeout_s
        await learner.publish(rest[2])
        kept = {key.version.step for key in served.reservoir.store.manifests}
        assert kept == {5, 6}
