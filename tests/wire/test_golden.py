"""What an earlier version wrote must decode for ever, and what is written under that name must be the same format.

When one of these fails after a change of a codec: give the new format a new version number, keep reading the old one,
add golden files for the new one. The files themselves are never written again.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
import zstandard

from forebay.wire import sum_logs
from forebay.wire.block import Kind
from forebay.wire.experience import decode_frame
from forebay.wire.host_state import HostState
from forebay.wire.logprobs import COMPACT_BOUND
from forebay.wire.v1 import experience_pb2
from forebay.wire.weights import apply
from tests.wire import golden_content
from tests.wire.making import content_of, facts

_WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8}


def _golden_frame(name: str) -> experience_pb2.Frame:
    return experience_pb2.Frame.FromString((golden_content.FOLDER / f"{name}.bin").read_bytes())


def test_golden_exact_frames_decode() -> None:
    members = decode_frame(_golden_frame("frame_exact_v1"))
    assert [facts(member) for member in members] == [facts(member) for member in golden_content.trajectories()]


def test_golden_compact_frames_decode() -> None:
    members = decode_frame(_golden_frame("frame_compact_v1"))
    for member, sent in zip(members, golden_content.trajectories(), strict=True):
        assert np.array_equal(member.tokens, sent.tokens)
        assert np.abs(member.logprobs - sent.logprobs).max() <= COMPACT_BOUND


@pytest.mark.parametrize(("name", "codec"), golden_content.FRAMES.items())
def test_frames_are_still_written_as_version_1(name: str, codec: str) -> None:
    """Before the outer zstd, whose versions may differ in what they write."""
    golden, fresh = _golden_frame(name), golden_content.frame(codec)
    assert content_of(fresh) == content_of(golden)
    for frame in (golden, fresh):
        for field in ("payload_bytes", "payload_xxh3"):
            frame.header.ClearField(field)
    assert fresh.header == golden.header


def test_logs_of_sums_are_the_same_bits_for_ever() -> None:
    """Exact frames name a sum and not its logarithm: another last bit here is another log-probability there."""
    sums = np.arange(sum_logs.STEPS, dtype=np.int32)
    logs = sum_logs.log_of(sums)
    nearest = np.log1p(sums / sum_logs.STEPS).astype(np.float32)
    assert np.abs(logs.view(np.int32) - nearest.view(np.int32)).max() <= 1
    assert xxhash.xxh3_64_intdigest(logs.astype("<f4").tobytes()) == 0x533542B05662BA34


def test_golden_weights_apply() -> None:
    base, new = golden_content.states()
    state = HostState.allocate(base.specs)
    for delta in ("delta_v2", "classes_v2"):
        apply(state, *golden_content.read_weights("anchor_v2"))
        assert state.digest() == base.digest()
        apply(state, *golden_content.read_weights(delta))
        assert state.digest() == new.digest()


def test_golden_weights_have_a_block_of_every_kind() -> None:
    kinds = set()
    for name in golden_content.WEIGHTS:
        manifest, payload = golden_content.read_weights(name)
        for entry in manifest.tensors:
            blocks = _streams(payload[entry.offset :][: entry.bytes], _WIDTHS[entry.dtype])
            kinds |= {kind for kind, _, _ in blocks}
    assert kinds == set(Kind) - {Kind.SAME}


@pytest.mark.parametrize("name", golden_content.WEIGHTS)
def test_weights_are_still_written_as_version_2(name: str) -> None:
    (golden, payload), fresh = golden_content.read_weights(name), golden_content.weights(name)
    for ours, theirs in zip(fresh.manifest.tensors, golden.tensors, strict=True):
        assert _streams(fresh.payload()[ours.offset :][: ours.bytes], _WIDTHS[ours.dtype]) == _streams(
            payload[theirs.offset :][: theirs.bytes], _WIDTHS[theirs.dtype]
        )
    for manifest in (golden, fresh.manifest):
        manifest.ClearField("chunks")
        manifest.ClearField("payload_bytes")
        for entry in manifest.tensors:
            entry.ClearField("offset")
            entry.ClearField("bytes")
    assert fresh.manifest == golden


def _streams(tensor: bytes, width: int) -> list[tuple[int, int, list[bytes]]]:
    """(kind, changed, streams) of each block: a second reading of the format, from its description alone."""
    blocks = []
    while tensor:
        kind, changed = struct.unpack_from("<BI", tensor)
        count = {0: 0, 1: 3 + max(2, width), 2: width, 3: width, 4: 1 + max(2, width), 5: 4 + max(2, width)}[kind]
        lengths = struct.unpack_from(f"<{count}I", tensor, 5)
        tensor = tensor[5 + 4 * count :]
        streams = []
        for length in lengths:
            streams.append(zstandard.decompress(tensor[:length]) if length else b"")
            tensor = tensor[length:]
        blocks.append((kind, changed, streams))
    return blocks
