"""The Weights service over the reservoir."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from forebay.buffer.calls import MAX_WAIT_S, answering, streaming
from forebay.buffer.errors import CallRefused
from forebay.buffer.reservoir import Reservoir
from forebay.buffer.shelf import Shelf
from forebay.buffer.weight_store import MAX_CHUNK_BYTES
from forebay.wire.v1 import weights_pb2, weights_pb2_grpc

PIECE_BYTES = 2 << 20


class WeightsService(weights_pb2_grpc.WeightsServicer):
    """Publications, announcements, plans, chunks."""

    def __init__(self, reservoir: Reservoir) -> None:
        self._reservoir = reservoir
        self._shelf = Shelf(reservoir)

    @answering
    async def Missing(self, request: weights_pb2.MissingRequest, context: Any) -> weights_pb2.MissingResponse:
        """Which chunks a publication must send."""
        return weights_pb2.MissingResponse(digests=self._reservoir.store.missing(request.chunks))

    @answering
    async def Publish(
        self, requests: AsyncIterator[weights_pb2.PublishRequest], context: Any
    ) -> weights_pb2.PublishResponse:
        """A manifest and the chunks that were missing; the version is announced once all of it is durable."""
        start = (await anext(aiter(requests))).start
        if not self._shelf.check(start.member, start.manifest):
            return weights_pb2.PublishResponse()
        stored_bytes = await self._store_chunks(requests, start.manifest)
        await self._shelf.publish(start.member, start.manifest)
        return weights_pb2.PublishResponse(stored_bytes=stored_bytes)

    @streaming
    async def Watch(self, request: weights_pb2.WatchRequest, context: Any) -> AsyncIterator[weights_pb2.Announcement]:
        """Each newest version, as it comes."""
        told: weights_pb2.Announcement | None = None
        while not self._reservoir.versions_changed.closed:
            newest = self._shelf.newest()
            if newest is not None and newest != told:
                await self._reservoir.durable()
                yield newest
                told = newest
            else:
                await self._reservoir.versions_changed.wait(MAX_WAIT_S)

    @answering
    async def Plan(self, request: weights_pb2.PlanRequest, context: Any) -> weights_pb2.PlanResponse:
        """The cheapest path."""
        return self._shelf.plan(request)

    @streaming
    async def Fetch(self, request: weights_pb2.FetchRequest, context: Any) -> AsyncIterator[weights_pb2.FetchResponse]:
        """Chunks in pieces, each chunk from the offset asked."""
        for chunk in request.chunks:
            offset = chunk.offset
            while piece := await asyncio.to_thread(self._reservoir.store.read_chunk, chunk.digest, offset, PIECE_BYTES):
                yield weights_pb2.FetchResponse(
                    chunk=weights_pb2.ChunkData(digest=chunk.digest, offset=offset, data=piece)
                )
                offset += len(piece)

    async def _store_chunks(
        self, requests: AsyncIterator[weights_pb2.PublishRequest], manifest: weights_pb2.Manifest
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
                stored += await asyncio.to_thread(self._store_pieces, piece.digest, pieces)
                pieces, held = [], 0
        return stored

    def _store_pieces(self, digest: bytes, pieces: list[bytes]) -> int:
        return self._reservoir.store.put_chunk(digest, b"".join(pieces))
