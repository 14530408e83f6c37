"""A tensor's digest that follows its changes: 128 bits, a sum over its 8-byte words.

    digest = (sum of D m_i, sum of E (m_i ^ m_i >> 29))      all modulo 2^64
    m_i = t ^ t >> 32  with  t = C (w_i ^ (A i + B))         i: index of the word, w_i: its bits

An update that changes n elements costs O(n): what the words were is taken away, what they are is added; no other word
is read. Equal tensors have equal digests whatever way led to them. It finds a wrong base, an update that is missing,
applied twice or to a part, swapped and shifted elements, and flipped bits in what an update touches (chance about 2^-64
each). It is no defence against somebody who makes up weights: that is blake3's part, over chunks and manifests. What
rots in memory beside the updates is found by computing it anew (`HostState.recheck`).

Incremental multiset hashing: Clarke et al., ASIACRYPT 2003 (there with secret keys; here against accidents).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TypeAlias

Sums: TypeAlias = tuple[int, int]  #: of first and of second, each below 2^64

FINGERPRINT_BYTES = 16
NOTHING: Sums = (0, 0)  #: of a tensor without elements
#: Odd constants A to E, part of the format.
MIXERS = (
    0x9E3779B97F4A7C15,
    0xD1B54A32D192ED03,
    0xFF51AFD7ED558CCD,
    0xC4CEB9FE1A85EC53,
    0xBF58476D1CE4E5B9,
)
_FULL = (1 << 64) - 1
_PACKED = struct.Struct("<QQ")


def plus(sums: Sums, change: Sums) -> Sums:
    """The sums of two sets of words, or of a tensor and what an update changed."""
    return (sums[0] + change[0]) & _FULL, (sums[1] + change[1]) & _FULL


def total(parts: Iterable[Sums]) -> Sums:
    """The sums of all parts."""
    sums = NOTHING
    for part in parts:
        sums = plus(sums, part)
    return sums


def minus(sums: Sums, other: Sums) -> Sums:
    """What leads from `other` to `sums`."""
    return (sums[0] - other[0]) & _FULL, (sums[1] - other[1]) & _FULL


def packed(sums: Sums) -> bytes:
    """16 bytes, as a manifest carries them."""
    return _PACKED.pack(*sums)


def unpacked(digest: bytes) -> Sums:
    """The inverse of `packed`."""
    first, second = _PACKED.unpack(digest)
    return first, second
