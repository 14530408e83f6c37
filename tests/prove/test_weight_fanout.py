"""Fifty receivers behind two relays: the center sends each version twice. Run with -s to see the figures, as JSON."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.weight_load.fanout import RELAYS, FanOut, Updates, client_of, relay_of, run_in, totals
from forebay.wire.chunker import CHUNK_BYTES
from forebay.wire.version import Version
from forebay.wire.weights import apply
from tests.faults.proxy import proxied

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]

RECEIVERS, BEHIND = 50, 100


async def test_fifty_receivers_behind_two_relays(tmp_path: Path) -> None:
    async with FanOut.started(run_in(tmp_path / "center"), RECEIVERS) as found:
        await found.publish(BEHIND)
        assert set(found.sends) == {len(RELAYS)}, "each version crosses each relay's line once"
        assert await found.digests_equal()
        told = totals(found.sizes, found.sent_bytes(), RECEIVERS) | {
            "receivers": RECEIVERS,
            "sends_per_version": found.sends[0],
            "relays_sent_bytes": sum(relay.mirror.traffic.counts["others", "sent"] for relay in found.relays),
            "behind": await _catch_up(found),
            "cut": await _cut(found, tmp_path / "cut"),
        }
    print(json.dumps(told))


async def _catch_up(found: FanOut) -> dict[str, Any]:
    """Somebody who holds the first version takes the cheapest path to the newest, 100 versions on."""
    store, shortcuts = found.relays[0].mirror.store, BEHIND // 8 + BEHIND // 64
    async with asyncio.timeout(120), AsyncExitStack() as stack:
        while len(store.manifests) < BEHIND + 1 + shortcuts:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # merged in the background
        client = await stack.enter_async_context(client_of(found.relays[0].port))
        late = Updates().state  # the same seed: the first version
        plan = await client.plan(Version(1, 0), late.digest())
        for manifest in plan.path:
            apply(late, manifest, await client.fetch(manifest))
    assert late.digest() == found.updates.state.digest()
    path, singles = sum(manifest.payload_bytes for manifest in plan.path), sum(found.sizes[1:])
    assert path < singles
    return {
        "versions": BEHIND,
        "path": [f"{manifest.base.step}-{manifest.version.step}" for manifest in plan.path],
        "bytes": path,
        "singles_bytes": singles,
        "anchor_bytes": found.sizes[0],
        "share_of_singles": round(path / singles, 3),
    }


async def _cut(found: FanOut, folder: Path) -> dict[str, Any]:
    """A third relay whose line breaks in the middle of the anchor."""
    async with (
        proxied(found.center.port) as proxy,
        relay_of(int(proxy.address.rpartition(":")[2]), found.run, folder, "cut") as relay,
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
