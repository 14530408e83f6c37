"""What the golden files hold, and how they were written: `python -m tests.wire.golden_content` (once for each version).

Everything is plain arithmetic, so that no generator of random numbers can change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from forebay.wire.host_state import HostState
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.v1 import experience_pb2, weights_pb2
from forebay.wire.version import Version
from forebay.wire.weights import Encoded, encode_anchor, encode_delta
from tests.wire.making import copy_of, frame_of, state_of

FOLDER = Path(__file__).parent / "golden"
FRAMES = {"frame_exact_v1": "zstd+exact", "frame_compact_v1": "zstd+compact"}
#: Bits of log-probabilities that a softmax gave its likeliest token
_RECORDED = (0xBE7B5A6A, 0xB9FE902D, 0xBA105DD2, 0xBF1EC0A5)
WEIGHTS = ("anchor_v2", "delta_v2", "classes_v2")


def trajectories() -> list[Trajectory]:
    """Two groups of several members, spans, turns and languages, and a long trajectory."""
    short = [_trajectory(group_id, member) for group_id in (3, 2**40) for member in range(3)]
    return [*short, _long()]


def _long() -> Trajectory:
    """Enough tokens for the form that lists the common ones; a large part of them is rare."""
    index = np.arange(900)
    mixed = (index * (2_654_435_761 + index) >> 9) % 65_521
    tokens = np.where(mixed % 11 < 4, 300 + mixed * 31 % 48_611, 500 + mixed % 199)
    return replace(
        _trajectory(9, 0),
        tokens=tokens.astype(np.int32),
        loss_mask=index % 301 < 280,
        logprobs=(-(index * index % 1021) / 64.0).astype(np.float32),
    )


def _trajectory(group_id: int, member: int) -> Trajectory:
    length = 9 + 4 * member
    index = np.arange(length)
    split = length // 2
    logprobs = (-(index * index % 13) / 8.0 - member / 128.0).astype(np.float32)
    logprobs.view(np.uint32)[-4:] = _RECORDED
    return Trajectory(
        group_id=group_id,
        member=member,
        prompt_tokens=np.arange(7, dtype=np.int32) * (1 + group_id % 5) * 1000,
        tokens=np.where(index < 4, 11 * index, (index * 7919 + member * 104_729) % 151_936).astype(np.int32),
        loss_mask=(index % 7 != 3) if member else np.ones(length, np.bool_),
        logprobs=logprobs,
        spans=(VersionSpan(start=0, version=Version(1, 4)), VersionSpan(start=split, version=Version(2, 4 + member))),
        temperature=0.7,
        top_p=0.95,
        reward=member / 4,
        reward_parts={"exact": float(member), "größe": -0.5} if member else {},
        finish_reason=("stop", "length", "abort")[member],
        generated_s=0.25 + member,
        scored_s=0.125,
        trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        metadata='{"question":"3 + 4 =","答え":7}',
    )


def states() -> tuple[HostState, HostState]:
    """Base and new, with sparse and dense changes of several types, an unchanged, an empty and a scalar tensor."""
    index = np.arange(140_000, dtype=np.uint32)
    bf16 = ((index * 2_654_435_761 >> 16) & 0x83FF | 0x3C00).astype(np.uint16)
    base = state_of(
        {
            "embed": ("BF16", (1400, 100), bf16),
            "empty": ("F32", (0, 4), np.zeros(0, np.uint32)),
            "head": ("F32", (300,), (index[:300] * 2_246_822_519) & 0xBF80FFFF),
            "kept": ("F16", (10,), np.arange(10, dtype=np.uint16)),
            "ladder": (
                "BF16",
                (140_000,),
                (0x3800 + (index * 2_654_435_761 >> 18 & 7) * 0x80 + index % 128).astype(np.uint16),
            ),
            "mlp": ("BF16", (140_000,), bf16 ^ 0x0155),
            "norm": ("BF16", (64,), np.full(64, 0x3F80, np.uint16)),
            "reset": ("F16", (200,), ((index[:200] * 2_246_822_519) >> 16).astype(np.uint16)),
            "scale": ("F8_E4M3", (50,), (index[:50] % 251).astype(np.uint8)),
            "steps": ("I64", (), np.array([41])),
        }
    )
    return base, copy_of(base, _advance)


def _advance(name: str, bits: np.ndarray) -> None:
    if name == "embed":
        bits[:60_000:97] += 1
        bits[60_000::1500] -= 2
        bits[5::1009] ^= 0x8000
        bits[90_000::20_011] = 0x7FC1
    elif name == "reset":
        bits[:] = 0x3C00
    elif name == "scale":
        bits[:] = bits[::-1].copy()
    elif name == "head":
        bits[::2] += 3
        bits[::9] -= 70_000
    elif name == "ladder":  # small values change more often
        index = np.arange(len(bits))
        moved = np.where(bits >> 7 & 7, index * 40_503 % 9973 % 97 < 2, index * 40_503 % 9973 % 19 < 8)
        bits += (moved & (bits % 128 < 120)).astype(np.uint16)
    elif name == "mlp":
        bits[np.arange(len(bits)) * 40_503 % 65_536 % 19 < 9] += 1
    elif name in ("norm", "steps"):
        bits += 1


def frame(codec: str) -> experience_pb2.Frame:
    """The golden frame as this program writes it."""
    return frame_of(trajectories(), codec, attempts={3: 1, 2**40: 2, 9: 1})


def weights(name: str) -> Encoded:
    """The golden anchor (of the base) or delta as this program writes it."""
    base, new = states()
    if name == "anchor_v2":
        return encode_anchor(base, version=Version(1, 4))
    classes = name == "classes_v2"
    return encode_delta(base, new, version=Version(2, 5), base_version=Version(1, 4), classes=classes)


def read_weights(name: str) -> tuple[weights_pb2.Manifest, bytes]:
    """(manifest, payload) of a golden file: the manifest's length as u32, the manifest, the payload."""
    content = (FOLDER / f"{name}.bin").read_bytes()
    end = 4 + int.from_bytes(content[:4], "little")
    return weights_pb2.Manifest.FromString(content[4:end]), content[end:]


def _write(name: str, content: Callable[[], bytes]) -> None:
    path = FOLDER / f"{name}.bin"
    if not path.exists():  # golden files are never written again: a new format gets a new name
        path.write_bytes(content())


def main() -> None:
    """Write the files that are not there."""
    for name, codec in FRAMES.items():
        _write(name, partial(_frame_file, codec))
    for name in WEIGHTS:
        _write(name, partial(_weights_file, name))


def _frame_file(codec: str) -> bytes:
    return frame(codec).SerializeToString(deterministic=True)


def _weights_file(name: str) -> bytes:
    encoded = weights(name)
    manifest = encoded.manifest.SerializeToString(deterministic=True)
    return len(manifest).to_bytes(4, "little") + manifest + encoded.payload()


if __name__ == "__main__":
    main()
