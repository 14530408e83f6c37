"""Names for bytes and for whole sets of weights: blake3, 32 bytes. (Tensors have `forebay.wire.fingerprint`.)"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import blake3

from forebay.wire.bytes_like import BytesLike, flat

DIGEST_BYTES = 32
_THREADS_PAY_FROM_BYTES = 1 << 20


def digest_of(data: BytesLike) -> bytes:
    """blake3 of `data`; big ones on every core."""
    content = flat(data)
    threads = blake3.blake3.AUTO if len(content) >= _THREADS_PAY_FROM_BYTES else 1
    digest: bytes = blake3.blake3(content, max_threads=threads).digest()
    return digest


def state_digest(tensors: Iterable[tuple[str, str, Sequence[int], bytes]]) -> bytes:
    """Digest of a state from (name, dtype, shape, tensor fingerprint) of its tensors in sorted-name order.

    Every part is length-prefixed, so no two states share what is hashed.
    """
    parts = [b"forebay state 2"]
    for name, dtype, shape, digest in tensors:
        for text in (name.encode(), dtype.encode()):
            parts += struct.pack("<Q", len(text)), text
        parts += struct.pack(f"<Q{len(shape)}Q", len(shape), *shape), digest
    whole: bytes = blake3.blake3(b"".join(parts)).digest()
    return whole
