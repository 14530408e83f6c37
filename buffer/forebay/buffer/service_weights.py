"""The Weights service over the buffer's runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from forebay.buffer.calls import MAX_WAIT_S, answering, streaming
from forebay.buffer.errors import CallRefused
from forebay.buffer.signals import Signal
from forebay.buffer.tenants import Tenants
from forebay.buffer.weight_store import MAX_CHUNK_BYTES, WeightStore
from forebay.buffer.weight_traffic import WeightTraffic, link_of
from forebay.wire.v1 import weights_pb2, weights_pb2_grpc

PIECE_BYTES = 1 << 19  #: what a cut line loses of each stream at most


class Versions(Protocol):
    """What can be watched, planned and fetched from: a buffer's shelf, a relay's mirror."""

    traffic: WeightTraffic

    @property
    def store(self) -> WeightStore: ...

    @property
    def changed(self) -> Signal: ...

    def newest(self) -> weights_pb2.Announcement | None: ...

    async def certain(self) -> None: ...

    def plan(self, request: weights_pb2.PlanRequest) -> weights_pb2.PlanResponse: ...


class WeightReading:
    """The calls of those who receive weights."""

    def __init__(self, versions_of: Callable[[Any], Versions]) -> None:
        """`versions_of` finds the run that a request means."""
        self._versions_of = versions_of

    @streaming
    async def Watch(self, request: weights_pb2.WatchRequest, context: Any) -> AsyncIterator[weights_pb2.Announcement]:
        """Each newest version, as it comes."""
        versions = self._versions_of(request)
        told: weights_pb2.Announcement | None = None
        while not versions.changed.closed:
            newest = versions.newest()
            if newest is not None and newest != told:
                await versions.certain()
                yield newest
                told = newest
            else:
                await versions.changed.wait(MAX_WAIT_S)

    @answering
    async def Plan(self, request: weights_pb2.PlanRequest, context: Any) -> weights_pb2.PlanResponse:
        """The cheapest path."""
        return self._versions_of(request).plan(request)

    @streaming
    async def Fetch(self, request: weights_pb2.FetchRequest, context: Any) -> AsyncIterator[weights_pb2.FetchResponse]:
        """Chunks in pieces, each chunk from the offset asked."""
        versions, link = self._versions_of(request), link_of(request.member)
        for chunk in request.chunks:
            offset = chunk.offset
            while piece := await asyncio.to_thread(versions.store.read_chunk, chunk.digest, offset, PIECE_BYTES):
                versions.traffic.sent(link, len(piece))
                yield weights_pb2.FetchResponse(
                    chunk=weights_pb2.ChunkData(digest=chunk.digest, offset=offset, data=piece)
                )
                offset += len(piece)


class WeightsService(WeightReading, weights_pb2_grpc.WeightsServicer):
    """Publications too."""

    def __init__(self, tenants: Tenants) -> None:
        super().__init__(lambda request: tenants.of(request).shelf)
        self._tenants = tenants

    @answering
    async def Missing(self, request: weights_pb2.MissingRequest, context: Any) -> weights_pb2.MissingResponse:
        """Which chunks a publication must send."""
        return weights_pb2.MissingResponse(digests=self._tenants.of(request).shelf.store.missing(request.chunks))

    @answering
    async def Publish(
        self, requests: AsyncIterator[weights_pb2.PublishRequest], context: Any
    ) -> weights_pb2.PublishResponse:
        """A manifest and the chunks that were missing; the version is announced once all of it is durable."""
        start = (await anext(aiter(requests))).start
        shelf = self._tenants.of(start).shelf
        if not shelf.check(start.member, start.manifest):
            return weights_pb2.PublishResponse(anchor_wanted=shelf.anchor_wanted)
        stored_bytes = await _store_chunks(shelf.store, requests, start.manifest)
        shelf.traffic.received(link_of(start.member), stored_bytes)
        await shelf.publish(start.member, start.manifest)
        return weights_pb2.PublishResponse(stored_bytes=stored_bytes, anchor_wanted=shelf.anchor_wanted)


async def _store_chunks(
    store: WeightStore, requests: AsyncIterator[weights_pb2.PublishRequest], manifest: weights_pb2.Manifest
) -> int:
    sizes = {chunk.digest: chunk.bytes for chunk in manifest.chunks}
    pieces, held, stored = list[bytes](), 0, 0
    async for request in requests:
        piece = request.chunk
        size = sizes.get(piece.digest)
        if size is None or piece.offset != held or held + len(piece.data) > min(size, MAX_CHUNK_BYTES):
            raise CallRefused(f"chunk {piece.digest.hex()} came out of order, or is not in the manifest")
        pieces.append(piece.data)
        held += len(piece.data)
        if held == size:
            stored += await asyncio.to_thread(_store_pieces, store, piece.digest, pieces)
            pieces, held = [], 0
    return stored


def _store_pieces(store: WeightStore, digest: bytes, pieces: list[bytes]) -> int:
    return store.put_chunk(digest, b"".join(pieces))
