"""Chunks from a buffer: several at once, each over a line that is free, resumed after cuts, and verified."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc.aio

from forebay.buffer.answers import WeightsDamaged
from forebay.buffer.calls import CLIENT_OPTIONS
from forebay.buffer.link import Link
from forebay.wire.digest import digest_of
from forebay.wire.v1 import common_pb2, weights_pb2, weights_pb2_grpc

#: One TCP connection carries a window a round trip; several fill a long line, and leave the control calls theirs.
LINES = 4
_DAMAGED_TRIES = 3


class ChunkFetcher:
    """Fetches over `LINES` connections of its own, opened when first needed; in process over the link's."""

    def __init__(self, link: Link, on_bytes: Callable[[int], None]) -> None:
        """`on_bytes` hears of every byte that came."""
        self._link, self._on_bytes = link, on_bytes
        self._stubs: list[Any] = []
        self._channels: list[Any] = []

    async def close(self) -> None:
        """Hang up."""
        for channel in self._channels:
            await channel.close(None)

    async def fetch(
        self, member: common_pb2.Member, chunks: Iterable[weights_pb2.Chunk]
    ) -> AsyncIterator[tuple[weights_pb2.Chunk, bytes]]:
        """Chunks in the order asked; a few are on their way ahead. Raises PlanOutdated, WeightsDamaged."""
        self._open()
        waiting, running = iter(chunks), list[tuple[weights_pb2.Chunk, asyncio.Task[bytes]]]()
        stubs = list(self._stubs)
        try:
            while True:
                while stubs and (chunk := next(waiting, None)) is not None:
                    task = asyncio.create_task(self._fetch(stubs.pop(), member, chunk, stubs))
                    running.append((chunk, task))
                if not running:
                    return
                chunk, task = running.pop(0)
                yield chunk, await task
        finally:
            for _, task in running:
                task.cancel()
            await asyncio.gather(*(task for _, task in running), return_exceptions=True)

    def _open(self) -> None:
        if not self._stubs:
            if isinstance(self._link.channel, grpc.aio.Channel):
                options = CLIENT_OPTIONS
                self._channels = [grpc.aio.insecure_channel(self._link.address, options) for _ in range(LINES)]
            channels = self._channels or [self._link.channel]
            self._stubs = [weights_pb2_grpc.WeightsStub(channel) for channel in channels]  # type: ignore[no-untyped-call]

    async def _fetch(self, stub: Any, member: common_pb2.Member, chunk: weights_pb2.Chunk, free: list[Any]) -> bytes:
        """One chunk, after which the stub is free for the next."""
        try:
            for _ in range(_DAMAGED_TRIES):
                data = bytearray()
                await self._link.call(lambda data=data: self._read(stub, member, chunk, data))  # type: ignore[misc]
                held = bytes(data)
                if await asyncio.to_thread(digest_of, held) == chunk.digest:
                    return held
        finally:
            free.append(stub)
        raise WeightsDamaged(
            f"chunk {chunk.digest.hex()} from the buffer at {self._link.address} does not match its digest after "
            f"{_DAMAGED_TRIES} tries: its weight store is damaged"
        )

    async def _read(self, stub: Any, member: common_pb2.Member, chunk: weights_pb2.Chunk, data: bytearray) -> None:
        """Add to `data` what is still missing of the chunk."""
        wanted = weights_pb2.ChunkRange(digest=chunk.digest, offset=len(data))
        async for answer in stub.Fetch(weights_pb2.FetchRequest(member=member, chunks=[wanted])):
            piece = answer.chunk
            if piece.offset != len(data) or len(data) + len(piece.data) > chunk.bytes:
                raise WeightsDamaged(f"chunk {chunk.digest.hex()}: the buffer sent bytes that were not asked for")
            data += piece.data
            self._on_bytes(len(piece.data))
