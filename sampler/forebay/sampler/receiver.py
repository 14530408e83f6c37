"""Keeps the weights current: watch, plan, fetch, apply, prove, install, while generation goes on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forebay.buffer.client import BufferClient, PlanOutdated, WeightsDamaged
from forebay.sampler.activity import Activity
from forebay.sampler.engine import Engine, HostCopy
from forebay.sampler.errors import InstallFailed
from forebay.sampler.host_weights import HostWeights
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version
from forebay.wire.weights import CorruptWeights, HostState, WeightsError

log = logging.getLogger("forebay.sampler.receiver")

#: The run file's spelling of a dtype -> safetensors'.
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float32": "F32"}
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0
#: A recheck reads the whole host copy once, at the speed of memory.
RECHECK_EVERY_INSTALLS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Weights that were proved: their digest is the learner's."""

    version: Version
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Weights that were proved, ready for the engine."""

    held: Held
    copy: HostCopy


class WeightReceiver:
    """Owns the host copy and tells the engine when to take it."""

    def __init__(
        self,
        client: BufferClient,
        folder: Path,
        dtype: str,
        activity: Activity,
        *,
        adapter_scaling: float | None = None,
    ) -> None:
        """`folder` is the local checkpoint, `dtype` the published one (safetensors' spelling). With `adapter_scaling`
        an adapter for the checkpoint is published, which counts so many times."""
        self._client, self._folder, self._dtype, self._activity = client, folder, dtype, activity
        self._adapter_scaling = adapter_scaling
        self._made: HostWeights | None = None
        self._announced: weights_pb2.Announcement | None = None
        self._news = asyncio.Condition()
        self._checkpoint_digest = b""
        self._proved: Staged | None = None
        self.held: Held | None = None  #: what the engine generates with; None before `hand_over`
        self.gate = asyncio.Lock()  #: whoever holds it keeps the engine's weights as they are

    # --- before the first permit

    async def prove(self) -> None:
        """Bring the host copy to the newest version, beginning with the local checkpoint.

        When the checkpoint's digest is the announced one, nothing is fetched. Waits for the learner's first
        publication; needs `watch` running. Raises UnreadableCheckpoint or OtherModel.
        """
        await asyncio.to_thread(self._read_checkpoint)
        self._activity.now("waiting: learner to publish the first weights")
        await self._heard(lambda: self._announced is not None)
        while True:
            try:
                self._proved = await self._stage(Held(version=Version(0, 0), digest=self._checkpoint_digest))
                return await asyncio.to_thread(self._host.keep)
            except PlanOutdated as error:
                log.info("planning anew: %s", error)

    async def hand_over(self, engine: Engine) -> None:
        """Make the engine serve the proved version: by name alone if it loaded just these bytes from the checkpoint."""
        proved = self._proved
        assert proved is not None, "prove comes first"
        held = proved.held
        native = await asyncio.to_thread(stored_dtypes, self._folder)
        if held.digest == self._checkpoint_digest and native == {self._dtype}:
            await engine.adopt(proved.copy)
        else:
            self._installed(await engine.install(proved.copy, put_back=self._host.put_back))
        await self._now_held(held)
        log.info("serving version %s, digest %s", held.version, held.digest.hex()[:12])

    # --- while serving

    async def watch(self) -> None:
        """Hear of versions, for ever."""
        async for announcement in self._client.watch():
            async with self._news:
                self._announced = announcement
                self._news.notify_all()

    async def follow(self, engine: Engine) -> None:
        """Install newer versions as they come, skipping those that were overtaken, for ever. Raises EngineDied."""
        retry_s = _FIRST_RETRY_S
        while True:
            await self._heard(self._is_behind)
            try:
                await self._advance(engine)
                retry_s = _FIRST_RETRY_S
            except (WeightsError, WeightsDamaged, InstallFailed, PlanOutdated) as error:
                log.warning("weights stay at version %s: %s", self.held and self.held.version, error)
                await self._newer_or(retry_s)
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)

    async def wait_change(self, held: Held | None) -> None:
        """Return when the engine's version is another than `held`."""
        await self._heard(lambda: self.held != held)

    async def _advance(self, engine: Engine) -> None:
        assert self.held is not None, "hand_over comes first"
        staged = await self._stage(self.held)
        if staged.held.digest == self.held.digest:  # the same weights under a new name: a learner that resumed
            await engine.adopt(staged.copy)
            return await self._now_held(staged.held)
        async with self.gate:
            try:
                self._installed(await engine.install(staged.copy, put_back=self._host.put_back))
            except InstallFailed:
                self._activity.failed_installs += 1
                raise
            await asyncio.to_thread(self._host.keep)
            await self._now_held(staged.held)
        log.info("installed version %s in %.3f s", staged.held.version, self._activity.update_pause_s)
        return await self._recheck()

    async def _recheck(self) -> None:
        """Every now and then: does memory hold what the digests say? If not, the next version comes by an anchor."""
        if self._activity.installs % RECHECK_EVERY_INSTALLS:
            return
        rotten = await asyncio.to_thread(self._host.recheck)
        if rotten:
            log.error("the host copy of %d tensors went bad in memory, the first is %s", len(rotten), rotten[0])

    async def _stage(self, base: Held) -> Staged:
        """Make the newest version in the host copy. A path that does not lead there is replaced by an anchor's."""
        plan = await self._client.plan(base.version if self.held else None, base.digest)
        try:
            return await self._take(plan)
        except (WeightsError, WeightsDamaged) as error:
            self._activity.replans += 1
            log.warning("taking the way from an anchor: %s", error)
        return await self._take(await self._client.plan(None, b""))

    async def _take(self, plan: weights_pb2.PlanResponse) -> Staged:
        version = Version.from_proto(plan.version)
        try:
            for manifest in plan.path:
                payload = await self._client.fetch(manifest)
                await asyncio.to_thread(self._host.apply, manifest, payload)
            if await asyncio.to_thread(self._host.state.digest) != plan.digest:
                raise CorruptWeights(f"the way to version {version} ended at other weights")
            copy = await asyncio.to_thread(self._host.as_copy, version)
        except BaseException:
            await asyncio.to_thread(self._host.put_back)
            raise
        return Staged(held=Held(version=version, digest=plan.digest), copy=copy)

    def _read_checkpoint(self) -> None:
        """Blocks."""
        read = HostState.from_safetensors(self._folder, self._dtype)
        if self._adapter_scaling is not None:
            # Not `read`: rounded before the sum as well as after it, a quarter of the weights would be others.
            native = stored_dtypes(self._folder) == {self._dtype}
            reread = partial(HostState.from_safetensors, self._folder)
            checkpoint = read if native else reread()
            from forebay.sampler.merged_weights import MergedWeights  # torch, for which no other sampler should wait

            self._made = MergedWeights(checkpoint, read, self._adapter_scaling, reread)
            return
        self._made = HostWeights(read.specs)
        self._host.state.copy_from(read)
        self._checkpoint_digest = self._host.state.digest()

    # --- who knows what

    @property
    def _host(self) -> HostWeights:
        assert self._made is not None, "prove comes first"
        return self._made

    def _installed(self, pause_s: float) -> None:
        self._activity.installs += 1
        self._activity.update_pause_s = pause_s

    async def _now_held(self, held: Held) -> None:
        async with self._news:
            self.held = held
            self._news.notify_all()

    def _is_behind(self) -> bool:
        newest, held = self._announced, self.held
        if newest is None or held is None:
            return False
        return (Version.from_proto(newest.version), newest.digest) != (held.version, held.digest)

    async def _heard(self, condition: Callable[[], bool]) -> None:
        async with self._news:
            await self._news.wait_for(condition)

    async def _newer_or(self, seconds: float) -> None:
        """Until another announcement, or for `seconds`."""
        known = self._announced
        try:
            async with asyncio.timeout(seconds):
                await self._heard(lambda: self._announced is not known)
        except TimeoutError:
            return

    def close(self) -> None:
        """Give the host memory back."""
        if self._made is not None:
            self._made.close()


def stored_dtypes(folder: Path) -> set[str]:
    """The tensors' types in a checkpoint's files, safetensors' spelling. The files were read before: they are sound."""
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        found |= {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    return found
