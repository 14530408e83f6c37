"""Which prompt a group id stands for."""

from __future__ import annotations

import hashlib

_ROUNDS = 6


def prompt_index(group_id: int, size: int, seed: int) -> int:
    """The group's prompt, in [0, size): each epoch of `size` groups visits every prompt once, in an order of its own.

    A Feistel network over the next power of four, walked until it lands inside: no table, and the same on every machine
    and with every library version. Raises ValueError when size < 1 or group_id < 0.
    """
    if size < 1 or group_id < 0:
        raise ValueError(f"prompt_index({group_id}, size={size}): expected group_id >= 0 and size >= 1")
    epoch, index = divmod(group_id, size)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    key = f"{seed}/{epoch}".encode()
    while True:
        index = _permute(index, half_bits, key)
        if index < size:
            return index


def _permute(index: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = index >> half_bits, index & mask
    for turn in range(_ROUNDS):
        mixed = hashlib.blake2b(right.to_bytes(8, "little") + bytes([turn]), key=key[:64], digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
    return left << half_bits | right
