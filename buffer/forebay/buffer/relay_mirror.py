"""A relay's own copy of the weights: fetched once from the upstream, served to a whole site."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from forebay.buffer.client import BufferClient, PlanOutdated, Refused, WeightsDamaged
from forebay.buffer.errors import CallRefused
from forebay.buffer.shelf import planned
from forebay.buffer.signals import Signal
from forebay.buffer.weight_key import Key
from forebay.buffer.weight_merger import Merger
from forebay.buffer.weight_plan import cheapest_path, wants_anchor
from forebay.buffer.weight_store import WeightStore
from forebay.buffer.weight_traffic import WeightTraffic
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version

log = logging.getLogger(__name__)

_NEWEST = "newest"  #: object that keeps the last announcement, for a relay that starts while its upstream is away
_LONGEST_PAUSE_S = 30.0


class Mirror:
    """Follows the upstream's newest version. What is announced here is here."""

    def __init__(self, upstream: BufferClient, store: WeightStore, skip_deltas: Sequence[int]) -> None:
        """`store` is the relay's own. Blocks on it."""
        self.store, self.changed, self.traffic = store, Signal(), WeightTraffic()
        self._upstream = upstream
        self._announced = _last_announced(store)
        self._merger = Merger(store, skip_deltas, lambda: self.changed.closed)
        self._tasks = dict[str, asyncio.Task[None]]()

    # --- the upstream's side

    async def follow(self) -> None:
        """Take each version as it is announced, for ever; what fails is tried again."""
        pause_s = 1.0
        while True:
            try:
                async for announcement in self._upstream.watch():
                    await self._take_newest(announcement)
                    pause_s = 1.0
            except (PlanOutdated, Refused, WeightsDamaged, CallRefused, OSError) as error:
                log.warning("weights stay at version %s, trying again: %s", self._version(), error)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _take_newest(self, announcement: weights_pb2.Announcement) -> None:
        """Nothing, when an earlier plan led here already. A long path comes in parts, each of them a version."""
        while (held := self._announced) is None or held.version != announcement.version:
            plan = await self._upstream.plan(self._version(), held.digest if held else b"")
            reached = weights_pb2.Announcement(version=plan.version, digest=plan.digest)
            if reached == held:  # the announced version is void meanwhile
                return
            for manifest in plan.path:
                await self._take(manifest)
            await asyncio.to_thread(self.store.place.put, _NEWEST, reached.SerializeToString())
            self._announced = reached
            self.changed.notify()
            self._start("tidy", self._tidied())

    async def _take(self, manifest: weights_pb2.Manifest) -> None:
        lacking = set(self.store.missing(manifest.chunks))
        wanted = {chunk.digest: chunk for chunk in manifest.chunks if chunk.digest in lacking}
        before = self._upstream.fetched_bytes
        try:
            async for chunk, data in self._upstream.fetch_chunks(list(wanted.values())):
                await asyncio.to_thread(self.store.put_chunk, chunk.digest, data)
        finally:
            self.traffic.received("upstream", self._upstream.fetched_bytes - before)
        known = self.store.published(Version.from_proto(manifest.version))
        another_way = known is not None and known.base_digest != manifest.base_digest and not manifest.anchor
        await asyncio.to_thread(lambda: self.store.put_manifest(manifest, merged=another_way))

    async def _tidied(self) -> None:
        published = [key.version for key in self.store.manifests if key.base is None]
        await asyncio.to_thread(self.store.collect, published)
        newest = self._version()
        if newest is not None and Key(newest) in self.store.manifests:
            await asyncio.to_thread(self._merger.work, newest)

    # --- the site's side

    def newest(self) -> weights_pb2.Announcement | None:
        """The newest version that is here, None before the first."""
        return self._announced

    async def certain(self) -> None:
        """It is: the announcement was stored before it was made."""

    def plan(self, request: weights_pb2.PlanRequest) -> weights_pb2.PlanResponse:
        """The cheapest path among what is here. Raises CallRefused when there is none."""
        target, digest = self._target(request)
        path = cheapest_path(self.store.manifests.values(), request.held_digest, digest)
        if path is None:
            raise CallRefused(f"version {target} cannot be reached from here any more: plan for the newest")
        if wants_anchor(path):
            self._start("ask", self._ask_for_anchor())
        return planned(self.store, path, target, digest)

    def close(self) -> None:
        """Nobody waits any longer."""
        self.changed.close()
        for task in self._tasks.values():
            task.cancel()

    def _target(self, request: weights_pb2.PlanRequest) -> tuple[Version, bytes]:
        newest = self._announced
        if newest is None:
            raise CallRefused("no weights are here yet: this relay has not reached its upstream, or that has none")
        if not request.HasField("target") or request.target == newest.version:
            return Version.from_proto(newest.version), newest.digest
        version = Version.from_proto(request.target)
        manifest = self.store.published(version)
        if manifest is None:
            raise CallRefused(f"version {version} is not here")
        return version, manifest.digest

    async def _ask_for_anchor(self) -> None:
        """The upstream sees from a plan like the site's that somebody had better have a new anchor."""
        await self._upstream.plan(None, b"")

    def _version(self) -> Version | None:
        return Version.from_proto(self._announced.version) if self._announced else None

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """In the background, one of each kind at a time."""
        running = self._tasks.get(name)
        if running is not None and not running.done():
            return work.close()
        self._tasks[name] = asyncio.create_task(_logged(name, work))
        return None


async def _logged(name: str, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except (Refused, CallRefused, OSError) as error:
        log.warning("%s: %s", name, error)


def _last_announced(store: WeightStore) -> weights_pb2.Announcement | None:
    """From the last time, if the store still leads there."""
    try:
        announced = weights_pb2.Announcement.FromString(store.place.get(_NEWEST))
    except (FileNotFoundError, DecodeError):
        return None
    path = cheapest_path(store.manifests.values(), b"", announced.digest)
    return announced if path is not None else None
