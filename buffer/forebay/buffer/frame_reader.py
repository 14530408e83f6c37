"""Frames from the journal to a learner: read in threads, a piece ahead of what is being sent.

A payload goes from the disk into the message as it lies; it is never made a protobuf field, which would copy it twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from forebay.buffer.journal import Journal
from forebay.buffer.records import Position

#: Frames travel together up to this size: few messages for small ones, and never one above gRPC's limit.
PIECE_BYTES = 1 << 20

# Tags of length-delimited fields, as protobuf writes them: LeaseResponse.frames, Frame.header, Frame.payload.
_FRAMES, _HEADER, _PAYLOAD = b"\x12", b"\x0a", b"\x12"


async def read_ahead(journal: Journal, positions: Sequence[Position]) -> AsyncIterator[bytes]:
    """Encoded LeaseResponses with the frames at `positions`, in order. Raises JournalDamaged."""
    pieces = _pieces(positions)
    coming = _reading(journal, next(pieces, []))
    for piece in pieces:
        part, coming = await coming, _reading(journal, piece)
        yield part
    yield await coming


def _reading(journal: Journal, piece: Sequence[Position]) -> asyncio.Future[bytes]:
    return asyncio.ensure_future(asyncio.to_thread(_read, journal, piece))


def _read(journal: Journal, piece: Sequence[Position]) -> bytes:
    parts: list[bytes] = []
    for position in piece:
        event, payload = journal.read(position)
        header = event.appended.header.SerializeToString()
        inner = b"".join((_HEADER, _varint(len(header)), header, _PAYLOAD, _varint(len(payload))))
        parts += (_FRAMES, _varint(len(inner) + len(payload)), inner, payload)
    return b"".join(parts)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _pieces(positions: Sequence[Position]) -> Iterator[list[Position]]:
    piece, size = list[Position](), 0
    for position in positions:
        if piece and size + position.payload_bytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(position)
        size += position.payload_bytes
    yield piece
