"""Publishing and planning: the weight store joined to what the journal says is published."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from forebay.buffer.errors import CallRefused
from forebay.buffer.reservoir import Reservoir
from forebay.buffer.signals import Signal
from forebay.buffer.weight_merger import Merger
from forebay.buffer.weight_plan import cheapest_path, first_part, wants_anchor
from forebay.buffer.weight_store import MAX_CHUNK_BYTES, WeightStore
from forebay.buffer.weight_traffic import WeightTraffic
from forebay.wire.digest import DIGEST_BYTES
from forebay.wire.v1 import common_pb2, journal_pb2, weights_pb2
from forebay.wire.version import Version

log = logging.getLogger(__name__)


class Shelf:
    """The weights' side of the reservoir."""

    def __init__(self, reservoir: Reservoir) -> None:
        self._reservoir = reservoir
        self.traffic = WeightTraffic()
        self.anchor_wanted = False  #: by somebody who had to begin with an old one; until the learner publishes one
        self._merger = Merger(reservoir.store, reservoir.run.publish.skip_deltas, lambda: self.changed.closed)
        self._merging: asyncio.Task[None] | None = None

    @property
    def store(self) -> WeightStore:
        """Where the bytes are."""
        return self._reservoir.store

    @property
    def changed(self) -> Signal:
        """Told when there may be a newer version; closed when the service stops."""
        return self._reservoir.versions_changed

    def check(self, member: common_pb2.Member, manifest: weights_pb2.Manifest) -> bool:
        """Whether a publication may begin; False when it is stored already. Raises CallRefused."""
        self._reservoir.speaker(member, common_pb2.ROLE_LEARNER)
        version, state = Version.from_proto(manifest.version), self._reservoir.state
        if version.incarnation != member.incarnation:
            raise CallRefused(f"version {version} is not incarnation {member.incarnation}'s to publish")
        if version in state.published:
            if state.published[version].digest != manifest.digest:
                raise CallRefused(f"version {version} is published with other weights: versions never change")
            return False
        newest = state.newest
        if newest is not None and version < newest:
            raise CallRefused(f"version {version} is older than the newest published one, {newest}")
        _check_sizes(manifest)
        self._check_base(manifest)
        return True

    async def publish(self, member: common_pb2.Member, manifest: weights_pb2.Manifest) -> None:
        """Make a version whose chunks are stored the newest one; durable when this returns. Raises CallRefused."""
        await asyncio.to_thread(self.store.put_manifest, manifest)
        if not self.check(member, manifest):
            return
        published = journal_pb2.Published(
            version=manifest.version,
            digest=manifest.digest,
            payload_bytes=manifest.payload_bytes,
            model_bytes=manifest.model_bytes,
        )
        self._reservoir.record(journal_pb2.Event(published=published))
        await self._reservoir.durable()
        self._reservoir.changed()
        self.anchor_wanted = self.anchor_wanted and not manifest.anchor
        await asyncio.to_thread(self._tidy, self._valid(), self._held(), manifest.digest)
        self._merge(Version.from_proto(manifest.version))

    def newest(self) -> weights_pb2.Announcement | None:
        """The newest version, None before the first."""
        version = self._reservoir.state.newest
        if version is None:
            return None
        return weights_pb2.Announcement(
            version=version.to_proto(), digest=self._reservoir.state.published[version].digest
        )

    async def certain(self) -> None:
        """Return when no crash can take back what `newest` said."""
        await self._reservoir.durable()

    def plan(self, request: weights_pb2.PlanRequest) -> weights_pb2.PlanResponse:
        """The cheapest path to the target, the newest version unless said. Raises CallRefused when there is none."""
        state = self._reservoir.state
        target = Version.from_proto(request.target) if request.HasField("target") else state.newest
        if target is None or target not in state.published:
            raise CallRefused(f"version {target} is not published" if target else "no weights are published yet")
        path = cheapest_path(self.store.edges(self._valid()), request.held_digest, state.published[target].digest)
        if path is None:
            raise CallRefused(f"version {target} cannot be reached any more: plan for the newest")
        self.anchor_wanted = self.anchor_wanted or wants_anchor(path)
        return planned(self.store, path, target, state.published[target].digest)

    def _held(self) -> set[bytes]:
        """Digests of the weights that live members hold."""
        members, keys = self._reservoir.members, self._reservoir.state.members
        return {entry.digest for key in keys if members.state(key) == "live" and (entry := members.get(key))} - {b""}

    def _tidy(self, valid: Sequence[Version], held: Collection[bytes], newest_digest: bytes) -> None:
        edges = self.store.edges(valid)
        try:
            for digest in held:  # whoever has fallen behind keeps its way, as cheap as it is
                self.store.pin(cheapest_path(edges, digest, newest_digest) or [])
            self.store.collect(valid)
        except OSError as error:  # the version is published; what could not be deleted now goes the next time
            log.warning("weights that nobody needs stay in the store: %s", error)

    def _merge(self, newest: Version) -> None:
        if self._merging is None or self._merging.done():  # else the next publication sees to what is missing
            self._merging = asyncio.create_task(self._merged(newest))

    async def _merged(self, newest: Version) -> None:
        await asyncio.to_thread(self._merger.work, newest)

    def _valid(self) -> list[Version]:
        return [version for version, entry in self._reservoir.state.published.items() if not entry.void]

    def _check_base(self, manifest: weights_pb2.Manifest) -> None:
        held = (self.store.published(version) for version in self._valid())
        bases = {one.digest for one in held if one is not None}
        if not manifest.anchor and manifest.base_digest not in bases:
            raise CallRefused(
                f"the base of version {Version.from_proto(manifest.version)} is not in the store: publish an anchor"
            )


def planned(
    store: WeightStore, path: Sequence[weights_pb2.Manifest], target: Version, digest: bytes
) -> weights_pb2.PlanResponse:
    """The answer with a path, or with its first part and where that leads; what it names is pinned."""
    part = first_part(path)
    store.pin(part)
    if len(part) < len(path):
        target, digest = Version.from_proto(part[-1].version), part[-1].digest
    return weights_pb2.PlanResponse(path=part, version=target.to_proto(), digest=digest)


def _check_sizes(manifest: weights_pb2.Manifest) -> None:
    sizes = [chunk.bytes for chunk in manifest.chunks]
    if sum(sizes) != manifest.payload_bytes or any(not 0 < size <= MAX_CHUNK_BYTES for size in sizes):
        raise CallRefused(
            f"the manifest's chunks hold {sum(sizes)} bytes, its payload {manifest.payload_bytes}: "
            f"expected the same, in chunks of at most {MAX_CHUNK_BYTES} bytes"
        )
    if len(manifest.digest) != DIGEST_BYTES or any(len(chunk.digest) != DIGEST_BYTES for chunk in manifest.chunks):
        raise CallRefused(f"digests have {DIGEST_BYTES} bytes")
