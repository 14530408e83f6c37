"""A relay fetches each version once, whoever asks it; cut lines resume; all other calls pass through."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from forebay.buffer.client import BufferClient, Fenced, Lease, Refused
from forebay.buffer.relay import Relay, relaying
from forebay.buffer.relay_http import RelayHttp
from forebay.buffer.weight_store import WeightStore
from forebay.buffer.weight_traffic import WeightTraffic
from forebay.config.models import RunFile
from forebay.wire.chunker import CHUNK_BYTES
from forebay.wire.v1 import common_pb2, weights_pb2
from forebay.wire.version import Version
from forebay.wire.weights import Encoded, HostState, apply, encode_anchor, encode_delta
from tests.buffer.conftest import Serve, Served
from tests.buffer.support import FakeClock, UnsyncedDisk, join_learner, join_sampler, make_run, produce, weights
from tests.buffer.test_weights import install, lineage
from tests.faults.proxy import proxied


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Other tasks give no notice: look whenever they have had their turn."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def kept_in(folder: Path) -> WeightStore:
    return WeightStore(folder, disk=UnsyncedDisk(), clock=FakeClock())


@asynccontextmanager
async def relay_of(address: str, run: RunFile, folder: Path, name: str = "edge-1") -> AsyncIterator[Relay]:
    """A relay of the buffer at `address`, its weights in `folder`."""
    async with relaying(run, address, name=name, grace_s=0.0, store=kept_in(folder)) as relay:
        yield relay


def site_of(relay: Relay) -> BufferClient:
    return BufferClient(f"127.0.0.1:{relay.port}", on_trouble=lambda line: None)


def traffic_of(served: Served) -> WeightTraffic:
    return next(iter(served.server.tenants)).shelf.traffic


async def receive(client: BufferClient, digests: list[bytes], last: bytes) -> HostState:
    """What a sampler does until it holds `last`: the digests on the way go to `digests`."""
    state: HostState | None = None
    async for _ in client.watch():
        state = await install(client, state)
        digests.append(state.digest())
        if digests[-1] == last:
            return state
    raise AssertionError("unreachable")


async def test_the_center_sends_each_version_once_a_relay(serve: Serve, tmp_path: Path) -> None:
    versions, states = lineage(4, anchors={3})
    async with serve() as served, served.client() as learner, AsyncExitStack() as stack:
        await learner.join("learner", "l", "", "", served.reservoir.state.run_json)
        names = ("edge-1", "edge-2")
        relays = [
            await stack.enter_async_context(relay_of(served.address, served.run, tmp_path / name, name))
            for name in names
        ]
        sites = [await stack.enter_async_context(site_of(relays[number % 2])) for number in range(6)]
        seen: list[list[bytes]] = [[] for _ in sites]
        tasks = [
            asyncio.create_task(receive(site, digests, states[-1].digest()))
            for site, digests in zip(sites, seen, strict=True)
        ]
        sent = dict.fromkeys(names, 0)
        for encoded, state in zip(versions, states, strict=True):
            await learner.publish(encoded)
            digest = state.digest()
            await until(lambda digest=digest: all(digest in digests for digests in seen))  # type: ignore[misc]
            for name in names:
                counted = traffic_of(served).counts[name, "sent"]
                assert counted - sent[name] == encoded.manifest.payload_bytes, "once, and nothing else"
                sent[name] = counted
        assert {(await task).digest() for task in tasks} == {states[-1].digest()}
        assert set(traffic_of(served).counts) == {*((name, "sent") for name in names), ("learner", "received")}
        whole = sum(encoded.manifest.payload_bytes for encoded in versions)
        for relay in relays:
            assert relay.mirror.traffic.counts == {("upstream", "received"): whole, ("others", "sent"): 3 * whole}
        status = await learner.status()
        assert {entry.member.id: entry.state for entry in status.members if entry.member.role == common_pb2.ROLE_EDGE}


async def test_a_line_cut_in_the_middle_of_a_chunk(serve: Serve, tmp_path: Path) -> None:
    state = weights(3, elements=9_000_000)
    encoded = encode_anchor(state, version=Version(1, 0))
    payload = encoded.manifest.payload_bytes
    assert len(encoded.manifest.chunks) >= 3
    async with serve() as served, served.client() as learner, proxied(served.server.port) as proxy:
        await learner.join("learner", "l", "", "", served.reservoir.state.run_json)
        await learner.publish(encoded)
        async with relay_of(proxy.address, served.run, tmp_path / "edge") as relay:
            await until(lambda: proxy.line.bytes_down > payload // 2)
            proxy.cut()
            assert relay.mirror.newest() is None
            proxy.mend()
            await until(lambda: relay.mirror.newest() is not None)
            assert payload <= proxy.line.bytes_down <= payload + CHUNK_BYTES, "at most one chunk was sent again"
            async with site_of(relay) as sampler:
                plan = await sampler.plan(None, b"")
                copy = HostState.allocate(state.specs)
                apply(copy, plan.path[0], await sampler.fetch(plan.path[0]))
                assert copy.digest() == state.digest()


async def test_a_relay_goes_on_where_it_stopped_and_serves_alone(serve: Serve, tmp_path: Path) -> None:
    versions, states = lineage(3, anchors=set())
    async with serve() as served, served.client() as learner:
        await learner.join("learner", "l", "", "", served.reservoir.state.run_json)
        for encoded in versions[:2]:
            await learner.publish(encoded)
        async with relay_of(served.address, served.run, tmp_path / "edge") as relay:
            await until(lambda: relay.mirror.newest() is not None)
        for encoded in versions[2:]:
            await learner.publish(encoded)
        before = traffic_of(served).counts["edge-1", "sent"]
        async with relay_of(served.address, served.run, tmp_path / "edge") as relay:
            await until(lambda: relay.mirror.newest().version.step == 3)  # type: ignore[union-attr]
        late = sum(encoded.manifest.payload_bytes for encoded in versions[2:])
        assert traffic_of(served).counts["edge-1", "sent"] - before == late
    async with relay_of(served.address, served.run, tmp_path / "edge") as relay, site_of(relay) as sampler:
        assert (await install(sampler, None)).digest() == states[3].digest(), "the upstream is gone"
        assert (await install(sampler, states[1])).digest() == states[3].digest()


async def test_chunks_that_are_here_are_not_fetched(serve: Serve, tmp_path: Path) -> None:
    """What a relay that died in the middle of a version had stored, it keeps."""
    encoded = encode_anchor(weights(3, elements=5_000_000), version=Version(1, 0))
    first = encoded.manifest.chunks[0]
    assert kept_in(tmp_path / "edge").put_chunk(first.digest, encoded.chunks[first.digest]) == first.bytes
    async with serve() as served, served.client() as learner:
        await learner.join("learner", "l", "", "", served.reservoir.state.run_json)
        await learner.publish(encoded)
        async with relay_of(served.address, served.run, tmp_path / "edge") as relay:
            await until(lambda: relay.mirror.newest() is not None)
            fetched = traffic_of(served).counts["edge-1", "sent"]
            assert fetched == encoded.manifest.payload_bytes - first.bytes > 0


async def test_the_same_weights_under_a_new_name(serve: Serve, tmp_path: Path) -> None:
    """A learner that resumes publishes what was there: nothing is fetched, but the version is told."""
    versions, states = lineage(1, anchors=set())
    async with serve() as served, served.client() as first, served.client() as second:
        await first.join("learner", "l", "", "", served.reservoir.state.run_json)
        await first.publish(versions[0])
        async with relay_of(served.address, served.run, tmp_path / "edge") as relay, site_of(relay) as sampler:
            watched = sampler.watch()
            assert (await anext(watched)).version.incarnation == 1
            before = dict(relay.mirror.traffic.counts)
            await second.join("learner", "l", "", "", served.reservoir.state.run_json)
            await second.rewind(0)
            await second.publish(encode_anchor(states[0], version=Version(2, 0)))
            assert (await anext(watched)).version.incarnation == 2
            assert relay.mirror.traffic.counts == before
            plan = await sampler.plan(Version(1, 0), states[0].digest())
            assert (plan.version.incarnation, list(plan.path)) == (2, [])
            assert (await install(sampler, None)).digest() == states[0].digest()


async def test_a_version_that_is_void_by_the_time_it_is_planned(serve: Serve, tmp_path: Path) -> None:
    versions, states = lineage(2, anchors=set())
    async with serve() as served, served.client() as first, served.client() as second:
        await first.join("learner", "l", "", "", served.reservoir.state.run_json)
        for encoded in versions:
            await first.publish(encoded)
        async with relay_of(served.address, served.run, tmp_path / "edge") as relay, site_of(relay) as sampler:
            await until(lambda: _step(relay) == 2)
            void = weights_pb2.Announcement(version=Version(1, 2).to_proto(), digest=states[2].digest())
            await second.join("learner", "l", "", "", served.reservoir.state.run_json)
            await second.rewind(0)
            await until(lambda: _step(relay) == 0)
            await asyncio.wait_for(relay.mirror._take_newest(void), 10)
            assert _step(relay) == 0
            assert (await install(sampler, states[2])).digest() == states[0].digest()


async def test_experience_and_control_pass_through(serve: Serve, tmp_path: Path) -> None:
    async with serve() as served, served.client() as learner:
        await join_learner(learner, served.run)
        async with relay_of(served.address, served.run, tmp_path / "edge") as relay, site_of(relay) as sampler:
            member = await join_sampler(sampler, served.run)
            assert await produce(sampler, 4, Version(1, 0)) == [0, 1, 2, 3]
            assert served.reservoir.state.members[common_pb2.ROLE_SAMPLER, member.id].groups == 4
            assert isinstance(await learner.lease(1, 5.0), Lease)
            assert (await sampler.status()).groups_leased == 2
            assert not (await sampler.heartbeat("generating", 0.0, None, b"", {})).fenced
            async with site_of(relay) as again:
                await join_sampler(again, served.run)
                with pytest.raises(Fenced, match="took over from 1"):
                    await sampler.admit(1, Version(1, 0), 0.0)
            wanted = weights_pb2.PlanRequest(target=Version(5, 5).to_proto())
            with pytest.raises(Refused, match=r"version 5\.5 is not here"):
                await sampler._ask(sampler._weights.Plan, wanted)


async def test_a_publication_through_a_relay(serve: Serve, tmp_path: Path) -> None:
    versions, states = lineage(1, anchors=set())
    async with (
        serve() as served,
        relay_of(served.address, served.run, tmp_path / "edge") as relay,
        site_of(relay) as learner,
    ):
        await learner.join("learner", "l", "", "", served.reservoir.state.run_json)
        for encoded in versions:
            await learner.publish(encoded)
        assert served.reservoir.state.newest == Version(1, 1)
        await until(lambda: relay.mirror.newest() is not None and relay.mirror.newest().version.step == 1)  # type: ignore[union-attr]
        assert (await install(learner, None)).digest() == states[1].digest()


async def test_who_is_far_behind_takes_the_shortcuts_of_the_relay(serve: Serve, tmp_path: Path) -> None:
    versions, states = lineage(20, anchors=set())
    async with serve() as served, served.client() as learner:
        await learner.join("learner", "l", "", "", served.reservoir.state.run_json)
        async with relay_of(served.address, served.run, tmp_path / "edge") as relay, site_of(relay) as sampler:
            for step, encoded in enumerate(versions):
                await learner.publish(encoded)
                await until(lambda step=step: _step(relay) == step)  # type: ignore[misc]
            await until(lambda: len(relay.mirror.store.manifests) == 23)
            plan = await sampler.plan(Version(1, 0), states[0].digest())
            assert [manifest.version.step for manifest in plan.path] == [8, 16, 17, 18, 19, 20]
            singles = sum(encoded.manifest.payload_bytes for encoded in versions[1:])
            assert sum(manifest.payload_bytes for manifest in plan.path) < singles
            assert (await install(sampler, states[0])).digest() == states[20].digest()


def _step(relay: Relay) -> int:
    newest = relay.mirror.newest()
    return newest.version.step if newest else -1


async def test_a_site_that_wants_an_anchor_gets_one_from_the_learner(serve: Serve, tmp_path: Path) -> None:
    states = [weights(step, elements=500) for step in range(4)]
    async with serve() as served, served.client() as learner:
        await learner.join("learner", "l", "", "", served.reservoir.state.run_json)
        await learner.publish(encode_anchor(states[0], version=Version(1, 0)))
        async with relay_of(served.address, served.run, tmp_path / "edge") as relay, site_of(relay) as sampler:
            for step in (1, 2):
                await learner.publish(_delta(states, step))
                await until(lambda step=step: _step(relay) == step)  # type: ignore[misc]
            shelf = next(iter(served.server.tenants)).shelf
            shelf.anchor_wanted = False  # the relay's own start
            await sampler.plan(None, b"")
            await until(lambda: shelf.anchor_wanted)


def _delta(states: list[HostState], step: int) -> Encoded:
    version, base = Version(1, step), Version(1, step - 1)
    return encode_delta(states[step - 1], states[step], version=version, base_version=base)


async def test_another_relay_of_the_same_name_fences(serve: Serve, tmp_path: Path) -> None:
    async with serve(buffer={"member_timeout_s": 0.4}) as served, served.client() as learner:
        await join_learner(learner, served.run)
        async with relay_of(served.address, served.run, tmp_path / "a") as old:
            await until(lambda: old.mirror.newest() is not None)
            async with relay_of(served.address, served.run, tmp_path / "b"):
                with pytest.raises(Fenced, match="edge-1 was replaced"):
                    await asyncio.wait_for(old.failed(), 30)


async def test_bytes_are_counted_by_link(serve: Serve, tmp_path: Path) -> None:
    versions, _ = lineage(0, anchors=set())
    async with serve() as served, served.client() as learner:
        await learner.join("learner", "l", "", "", served.reservoir.state.run_json)
        await learner.publish(versions[0])
        async with relay_of(served.address, served.run, tmp_path / "edge") as relay, site_of(relay) as sampler:
            http = RelayHttp(relay.mirror, "test", "127.0.0.1:0")
            port = await http.start()
            await until(lambda: relay.mirror.newest() is not None)
            await join_sampler(sampler, make_run(tmp_path / "run"))
            await install(sampler, None)
            text = await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/metrics")
            size = float(versions[0].manifest.payload_bytes)
            for link, direction in (("upstream", "received"), ("samplers", "sent")):
                line = f'forebay_weight_bytes_total{{direction="{direction}",link="{link}",run="test"}} {size}'
                assert line in text.splitlines()
            assert await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/readyz") == "ready\n"
            await http.stop()


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
