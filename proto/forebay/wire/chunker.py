"""A payload cut into chunks that are named by their contents."""

from __future__ import annotations

from forebay.wire.bytes_like import BytesLike, flat
from forebay.wire.digest import digest_of
from forebay.wire.v1 import weights_pb2

CHUNK_BYTES = 1 << 22


class Chunker:
    """Cuts what is written into chunks of CHUNK_BYTES and names them."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, bytes] = {}
        self.written_bytes = 0
        self._named: list[weights_pb2.Chunk] = []
        self._open = bytearray()

    def write(self, data: BytesLike) -> None:
        """Append to the payload."""
        content = flat(data)
        self._open += content
        self.written_bytes += len(content)
        while len(self._open) >= CHUNK_BYTES:
            self._cut(CHUNK_BYTES)

    def close(self) -> list[weights_pb2.Chunk]:
        """The last, shorter chunk too: all of them in payload order."""
        if self._open:
            self._cut(len(self._open))
        return self._named

    def _cut(self, size: int) -> None:
        data = bytes(self._open[:size])
        del self._open[:size]
        digest = digest_of(data)
        self.chunks[digest] = data
        self._named.append(weights_pb2.Chunk(digest=digest, bytes=size))
