"""What the experience codec saves, and how fast it is: `python -m benchmarks.experience_codec [--quick]`.

The experience is real: `benchmarks/recordings/*.parquet`, see the README there. Every figure counts whole frames,
headers included, against the same facts as

    json   one compact object a trajectory, numbers in their shortest exact form
    raw    plain Arrow columns: int32 token ids, float32 log-probabilities, int32 version and mask bit of every token,
           the prompt in every trajectory, and the other columns of a trajectory (buffers only, no Arrow metadata);
           what names the sender is left out, since it stands once in a frame
    zstd   the raw columns through zstd, frame by frame

Sizes are of the frames as the samplers sent them. Speed is raw megabytes a second of processor time on one core, best
of several rounds, once over those small frames (`_sent`) and once over full ones: frames that took groups until
FULL_TOKENS tokens, as the sampler's shipper closes them, or until the recording ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard
from pyarrow import parquet

from forebay.wire.experience import SCHEMA, decode_frame, encode_frame, from_record_batch
from forebay.wire.trajectory import Trajectory
from forebay.wire.v1 import experience_pb2

FOLDER = Path(__file__).parent / "recordings"
FULL_TOKENS = 200_000
FORMS = {"lossless": "zstd+exact", "compact": "zstd+compact"}
_ZSTD_LEVEL = 3
_ORIGIN = ("run", "sampler", "fleet", "region", "incarnation", "sequence")
_PER_TOKEN = ("tokens", "logprobs", "spans", "loss_mask", "prompt_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What one frame holds, before it is encoded."""

    origin: dict[str, Any]
    attempts: dict[int, int]
    trajectories: tuple[Trajectory, ...]

    def encode(self, codec: str) -> experience_pb2.Frame:
        """The frame."""
        return encode_frame(self.trajectories, **self.origin, attempts=self.attempts, codec=codec)

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens, as the shipper counts them."""
        return sum(len(member.tokens) + len(member.prompt_tokens) for member in self.trajectories)


@dataclass(slots=True, kw_only=True)
class Sizes:
    """Bytes of one recording in every form, and its generated tokens."""

    tokens: int = 0
    json: int = 0
    raw: int = 0
    zstd: int = 0
    lossless: int = 0
    compact: int = 0

    def add(self, other: Sizes) -> None:
        """Count another part."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def figures(self) -> dict[str, float]:
        """Bytes a generated token and shares saved."""
        saving = {
            f"saving_vs_{peer}_{form}": round(1 - getattr(self, form) / getattr(self, peer), 4)
            for peer in ("raw", "json", "zstd")
            for form in FORMS
        }
        kinds = (*FORMS, "raw", "json", "zstd")
        return saving | {f"bytes_per_token_{kind}": round(getattr(self, kind) / self.tokens, 3) for kind in kinds}


def load(path: Path) -> list[Parcel]:
    """The frames of a recording, in order."""
    table = parquet.read_table(path).cast(SCHEMA).combine_chunks()
    (batch,) = table.to_batches()
    rows = batch.select([*_ORIGIN, "attempt"]).to_pylist()
    frames: dict[tuple[Any, ...], list[tuple[dict[str, Any], Trajectory]]] = {}
    for row, trajectory in zip(rows, from_record_batch(batch), strict=True):
        key = (row["sampler"], row["incarnation"], row["sequence"])
        frames.setdefault(key, []).append((row, trajectory))
    return [_parcel(members) for members in frames.values()]


def _parcel(members: Sequence[tuple[dict[str, Any], Trajectory]]) -> Parcel:
    first, _ = members[0]
    return Parcel(
        origin={name: first[name] for name in _ORIGIN},
        attempts={trajectory.group_id: row["attempt"] for row, trajectory in members},
        trajectories=tuple(trajectory for _, trajectory in members),
    )


def full(parcels: Iterable[Parcel]) -> list[Parcel]:
    """The same groups in frames as a sampler with many of them would send."""
    frames: list[list[Parcel]] = [[]]
    for parcel in parcels:
        frames[-1].append(parcel)
        if sum(part.tokens for part in frames[-1]) >= FULL_TOKENS:
            frames.append([])
    return [_joined(parts) for parts in frames if parts]


def _joined(parts: Sequence[Parcel]) -> Parcel:
    return Parcel(
        origin=parts[0].origin,
        attempts={group_id: attempt for part in parts for group_id, attempt in part.attempts.items()},
        trajectories=tuple(trajectory for part in parts for trajectory in part.trajectories),
    )


def raw_columns(parcel: Parcel) -> pa.RecordBatch:
    """The facts of a frame as plain columns; versions by their step, which grows within a run."""
    members = parcel.trajectories
    whole: dict[str, Any] = {
        "prompt_tokens": pa.array([member.prompt_tokens for member in members], pa.list_(pa.int32())),
        "tokens": pa.array([member.tokens for member in members], pa.list_(pa.int32())),
        "logprobs": pa.array([member.logprobs for member in members], pa.list_(pa.float32())),
        "versions": pa.array([_versions(member) for member in members], pa.list_(pa.int32())),
        "loss_mask": pa.array([member.loss_mask for member in members], pa.list_(pa.bool_())),
        "attempt": pa.array([parcel.attempts[member.group_id] for member in members], pa.uint32()),
    }
    for field in SCHEMA:
        if field.name not in (*_ORIGIN, *_PER_TOKEN, "attempt"):
            whole[field.name] = pa.array([_plain(member, field.name) for member in members], field.type)
    return pa.record_batch(whole)


def _plain(member: Trajectory, name: str) -> Any:
    value = getattr(member, name)
    return list(value.items()) if name == "reward_parts" else value


def _versions(member: Trajectory) -> np.ndarray[Any, Any]:
    starts = [span.start for span in member.spans]
    return np.repeat([span.version.step for span in member.spans], np.diff([*starts, len(member.tokens)]))


def as_json(parcel: Parcel) -> bytes:
    """The facts of a frame as JSON lines."""
    return "\n".join(_json_row(member, parcel.attempts[member.group_id]) for member in parcel.trajectories).encode()


def _json_row(member: Trajectory, attempt: int) -> str:
    others = [f.name for f in SCHEMA if f.name not in (*_ORIGIN, *_PER_TOKEN, "attempt")]
    row = {name: getattr(member, name) for name in others} | {"attempt": attempt}
    row |= {"prompt_tokens": member.prompt_tokens.tolist(), "tokens": member.tokens.tolist()}
    row |= {"versions": _versions(member).tolist(), "loss_mask": member.loss_mask.tolist()}
    text = json.dumps(row, separators=(",", ":"), ensure_ascii=False)
    numbers = ",".join(np.format_float_positional(value, unique=True, trim="-") for value in member.logprobs)
    return f'{text[:-1]},"logprobs":[{numbers}]}}'


def sizes(parcel: Parcel) -> Sizes:
    """What one frame takes in every form."""
    raw = raw_columns(parcel)
    return Sizes(
        tokens=sum(len(member.tokens) for member in parcel.trajectories),
        json=len(as_json(parcel)),
        raw=raw.nbytes,
        zstd=len(zstandard.compress(raw.serialize().to_pybytes(), _ZSTD_LEVEL)),
        **{form: parcel.encode(codec).ByteSize() for form, codec in FORMS.items()},
    )


def speed(parcels: Sequence[Parcel], codec: str, budget_s: float) -> tuple[float, float]:
    """(encoding, decoding) in raw MB/s, each the best round within about `budget_s` seconds."""
    raw_mb = sum(raw_columns(parcel).nbytes for parcel in parcels) / 1e6
    frames = [parcel.encode(codec) for parcel in parcels]
    encode_s = _best_s(lambda: [parcel.encode(codec) for parcel in parcels], budget_s)
    decode_s = _best_s(lambda: [decode_frame(frame) for frame in frames], budget_s)
    return raw_mb / encode_s, raw_mb / decode_s


def _best_s(work: Callable[[], object], budget_s: float) -> float:
    rounds: list[float] = []
    while sum(rounds) < budget_s or len(rounds) < 3:
        started_s = time.process_time()
        work()
        rounds.append(time.process_time() - started_s)
    return min(rounds)


def speeds(recordings: Sequence[Sequence[Parcel]], budget_s: float) -> dict[str, float]:
    """Speeds over full frames and over those sent (`_sent`), lossless; compact beside it."""
    together = [frame for parcels in recordings for frame in full(parcels)]
    sent = [parcel for parcels in recordings for parcel in parcels]
    found: dict[str, float] = {}
    for frames, codec, suffix in (
        (together, "zstd+exact", ""),
        (together, "zstd+compact", "_compact"),
        (sent, "zstd+exact", "_sent"),
    ):
        encode, decode = speed(frames, codec, budget_s)
        found |= {f"encode_mb_s{suffix}": round(encode, 1), f"decode_mb_s{suffix}": round(decode, 1)}
    return found


def measure(path: Path, budget_s: float) -> tuple[Sizes, dict[str, Any]]:
    """Sizes and figures of one recording."""
    parcels = load(path)
    total = Sizes()
    for parcel in parcels:
        total.add(sizes(parcel))
    shape = {
        "frames": len(parcels),
        "trajectories": sum(len(parcel.trajectories) for parcel in parcels),
        "generated_tokens": total.tokens,
        "raw_kb_per_frame_sent": round(total.raw / len(parcels) / 1e3, 1),
        "raw_kb_per_full_frame": round(total.raw / len(full(parcels)) / 1e3, 1),
    }
    return total, shape | total.figures() | speeds([parcels], budget_s)


def main(argv: Sequence[str]) -> int:
    """Measure every recording, print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experience_codec", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter rounds, under 50 s")
    budget_s = 1.0 if parser.parse_args(argv).quick else 5.0
    total = Sizes()
    recordings: dict[str, dict[str, Any]] = {}
    paths = sorted(FOLDER.glob("*.parquet"))
    for path in paths:
        part, recordings[path.stem] = measure(path, budget_s)
        total.add(part)
        _say(path.stem, recordings[path.stem])
    everything = [load(path) for path in paths]
    print(json.dumps(total.figures() | speeds(everything, budget_s) | {"recordings": recordings}))
    return 0


def _say(name: str, figures: dict[str, Any]) -> None:
    print(f"{name}: {figures['trajectories']} trajectories in {figures['frames']} frames")
    for form in FORMS:
        print(
            f"  {form:8} {figures[f'bytes_per_token_{form}']:7.2f} bytes a generated token: saves "
            f"{figures[f'saving_vs_raw_{form}']:.1%} of {figures['bytes_per_token_raw']:.1f} raw, "
            f"{figures[f'saving_vs_json_{form}']:.1%} of {figures['bytes_per_token_json']:.1f} JSON, "
            f"{figures[f'saving_vs_zstd_{form}']:.1%} of {figures['bytes_per_token_zstd']:.1f} raw with zstd"
        )
    print(
        f"  encode {figures['encode_mb_s']:.0f}, decode {figures['decode_mb_s']:.0f} raw MB/s in full frames; "
        f"{figures['encode_mb_s_sent']:.0f} and {figures['decode_mb_s_sent']:.0f} in the frames sent",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
