"""Publishing and planning: the weight store joined to what the journal says is published."""

from __future__ import annotations

import asyncio

from forebay.buffer.errors import CallRefused
from forebay.buffer.reservoir import Reservoir
from forebay.buffer.weight_plan import cheapest_path
from forebay.buffer.weight_store import DIGEST_BYTES, MAX_CHUNK_BYTES
from forebay.wire.v1 import common_pb2, journal_pb2, weights_pb2
from forebay.wire.version import Version


class Shelf:
    """The weights' side of the reservoir."""

    def __init__(self, reservoir: Reservoir) -> None:
        self._reservoir = reservoir

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
        store = self._reservoir.store
        await asyncio.to_thread(store.put_manifest, manifest)
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
        await asyncio.to_thread(store.collect, self._valid())

    def plan(self, request: weights_pb2.PlanRequest) -> weights_pb2.PlanResponse:
        """The cheapest path to the target, the newest version unless said. Raises CallRefused when there is none."""
        state, store = self._reservoir.state, self._reservoir.store
        target = Version.from_proto(request.target) if request.HasField("target") else state.newest
        if target is None or target not in state.published:
            raise CallRefused(f"version {target} is not published" if target else "no weights are published yet")
        valid = [store.manifests[version] for version in self._valid() if version in store.manifests]
        path = cheapest_path(valid, request.held_digest, state.published[target].digest)
        if path is None:
            raise CallRefused(f"version {target} cannot be reached any more: plan for the newest")
        store.pin([Version.from_proto(manifest.version) for manifest in path])
        return weights_pb2.PlanResponse(path=path, version=target.to_proto(), digest=state.published[target].digest)

    def newest(self) -> weights_pb2.Announcement | None:
        """The newest version, None before the first."""
        version = self._reservoir.state.newest
        if version is None:
            return None
        return weights_pb2.Announcement(
            version=version.to_proto(), digest=self._reservoir.state.published[version].digest
        )

    def _valid(self) -> list[Version]:
        return [version for version, entry in self._reservoir.state.published.items() if not entry.void]

    def _check_base(self, manifest: weights_pb2.Manifest) -> None:
        stored = self._reservoir.store.manifests
        bases = {stored[version].digest for version in self._valid() if version in stored}
        if not manifest.anchor and manifest.base_digest not in bases:
            raise CallRefused(
                f"the base of version {Version.from_proto(manifest.version)} is not in the store: publish an anchor"
            )


def _check_sizes(manifest: weights_pb2.Manifest) -> None:
    sizes = [chunk.bytes for chunk in manifest.chunks]
    if sum(sizes) != manifest.payload_bytes or any(not 0 < size <= MAX_CHUNK_BYTES for size in sizes):
        raise CallRefused(
            f"the manifest's chunks hold {sum(sizes)} bytes, its payload {manifest.payload_bytes}: "
            f"expected the same, in chunks of at most {MAX_CHUNK_BYTES} bytes"
        )
    if len(manifest.digest) != DIGEST_BYTES or any(len(chunk.digest) != DIGEST_BYTES for chunk in manifest.chunks):
        raise CallRefused(f"digests have {DIGEST_BYTES} bytes")
