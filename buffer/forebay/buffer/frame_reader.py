"""Frames from the journal to a learner: read in threads, a piece ahead of what is being sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from forebay.buffer.journal import Journal
from forebay.buffer.records import Position
from forebay.wire.v1 import experience_pb2

#: Frames travel together up to this size: few messages for small ones, and never one above gRPC's limit.
PIECE_BYTES = 1 << 20


async def read_ahead(journal: Journal, positions: Sequence[Position]) -> AsyncIterator[experience_pb2.LeaseResponse]:
    """Messages with the frames at `positions`, in order. Raises JournalDamaged."""
    pieces = _pieces(positions)
    coming = _reading(journal, next(pieces, []))
    for piece in pieces:
        part, coming = await coming, _reading(journal, piece)
        yield part
    yield await coming


def _reading(journal: Journal, piece: Sequence[Position]) -> asyncio.Future[experience_pb2.LeaseResponse]:
    return asyncio.ensure_future(asyncio.to_thread(_read, journal, piece))


def _read(journal: Journal, piece: Sequence[Position]) -> experience_pb2.LeaseResponse:
    part = experience_pb2.LeaseResponse()
    for position in piece:
        event, payload = journal.read(position)
        part.frames.add(header=event.appended.header, payload=payload)
    return part


def _pieces(positions: Sequence[Position]) -> Iterator[list[Position]]:
    piece, size = list[Position](), 0
    for position in positions:
        if piece and size + position.payload_bytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(position)
        size += position.payload_bytes
    yield piece
