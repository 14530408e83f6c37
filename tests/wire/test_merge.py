"""Merged deltas lead to the same weights as one by one, for every bit pattern and however they are merged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.wire.block import pack_steps
from forebay.wire.chunker import Chunker
from forebay.wire.dtype import is_float
from forebay.wire.host_state import HostState, TensorSpec
from forebay.wire.merge import CannotMerge, Delta, merge, payload_reader
from forebay.wire.ulp import steps
from forebay.wire.version import Version
from forebay.wire.weights import CorruptWeights, Encoded, apply, encode_anchor, encode_delta
from tests.wire.making import copy_of

SPECS = [
    TensorSpec(name="bf16", dtype="BF16", shape=(50, 21)),
    TensorSpec(name="empty", dtype="BF16", shape=(0, 4)),
    TensorSpec(name="f16", dtype="F16", shape=(333,)),
    TensorSpec(name="f32", dtype="F32", shape=(7, 11, 3)),
    TensorSpec(name="f8", dtype="F8_E4M3", shape=(257,)),
    TensorSpec(name="i32", dtype="I32", shape=(129,)),
    TensorSpec(name="i64", dtype="I64", shape=(65,)),
    TensorSpec(name="scalar", dtype="F32", shape=()),
]


def random_state(rng: np.random.Generator) -> HostState:
    """Any bit patterns at all: NaN payloads, infinities, subnormals, both zeros."""
    state = HostState.allocate(SPECS)
    for spec in SPECS:
        bits = state.open_for_update(spec.name)
        bits[:] = rng.integers(0, 256, bits.nbytes, np.uint8).view(bits.dtype)
    return state


def moved(state: HostState, rng: np.random.Generator, share: float, *, far: bool) -> HostState:
    """A copy in which about `share` of the elements of about half of the tensors moved, a little or anywhere."""

    def change(name: str, bits: np.ndarray) -> None:
        if rng.random() < 0.5 or not len(bits):
            return
        where = np.flatnonzero(rng.random(len(bits)) < share)
        step = rng.integers(0, 256, len(where) * bits.itemsize, np.uint8).view(bits.dtype)
        bits[where] += step if far else step % 3 - bits.dtype.type(1)

    return copy_of(state, change)


def in_steps(old: HostState, new: HostState, *, version: Version, base_version: Version) -> Encoded:
    """The delta with every block in ULP steps, also where another form is smaller."""
    encoded = encode_delta(old, new, version=version, base_version=base_version)
    payload, manifest = Chunker(), encoded.manifest
    for entry in manifest.tensors:
        entry.offset = payload.written_bytes
        before, after = old.view_of(entry.name), new.view_of(entry.name)
        where = np.flatnonzero(before != after)
        payload.write(pack_steps(where, steps(before[where], after[where], is_float=is_float(entry.dtype))))
        entry.bytes = payload.written_bytes - entry.offset
    del manifest.chunks[:]
    manifest.chunks.extend(payload.close())
    manifest.payload_bytes = payload.written_bytes
    return Encoded(manifest=manifest, chunks=payload.chunks)


def lineage(
    seed: int,
    steps: int,
    share: float,
    *,
    far: bool = False,
    back: bool = False,
    encode: Callable[..., Encoded] = in_steps,
) -> tuple[list[HostState], list[Encoded]]:
    """States 0 to `steps` and the deltas between them; with `back` the last state is the first one again."""
    rng = np.random.default_rng(seed)
    states = [random_state(rng)]
    for _ in range(steps):
        states.append(moved(states[-1], rng, share, far=far))
    if back:
        states[-1] = states[0]
    deltas = [
        encode(old, new, version=Version(1, step + 1), base_version=Version(1, step))
        for step, (old, new) in enumerate(itertools.pairwise(states))
    ]
    return states, deltas


def merged_of(encoded: Sequence[Encoded]) -> Encoded:
    return merge([Delta.of(one) for one in encoded])


def applied(state: HostState, encoded: Encoded) -> HostState:
    """A copy of `state` with the update in it, proved by `apply`."""
    target = copy_of(state)
    apply(target, encoded.manifest, encoded.payload())
    return target


def assert_same_bits(ours: HostState, theirs: HostState) -> None:
    for name in theirs.names:
        assert ours.view_of(name).tobytes() == theirs.view_of(name).tobytes(), name


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 6), share=st.sampled_from([0.004, 0.05]), cut=st.integers(1, 5))
def test_merged_is_each_in_turn(seed: int, steps: int, share: float, cut: int) -> None:
    states, deltas = lineage(seed, steps, share)
    whole = merged_of(deltas)
    assert_same_bits(applied(states[0], whole), states[-1])
    assert (whole.manifest.base_digest, whole.manifest.digest) == (states[0].digest(), states[-1].digest())
    parts = [part for part in (deltas[:cut], deltas[cut:]) if part]
    twice = merged_of([merged_of(part) for part in parts])
    assert twice.manifest.SerializeToString() == whole.manifest.SerializeToString()
    assert twice.payload() == whole.payload()
    stepwise = reduce(lambda done, one: merged_of([done, one]), deltas)
    assert_same_bits(applied(states[0], stepwise), states[-1])


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 5), far=st.booleans())
def test_whatever_the_forms_it_merges_with_the_base_at_hand(seed: int, steps: int, far: bool) -> None:
    states, deltas = lineage(seed, steps, 0.3, far=far, encode=encode_delta)
    try:
        whole = merged_of(deltas)
        assert_same_bits(applied(states[0], whole), states[-1])
    except CannotMerge:
        assert {entry.codec for delta in deltas for entry in delta.manifest.tensors} & {"xor", "mixed"}
    cut = steps // 2
    behind = [encode_anchor(states[0], version=Version(1, 0)), *deltas[:cut]]
    whole = merge([Delta.of(one) for one in deltas[cut:]], [Delta.of(one) for one in behind])
    assert_same_bits(applied(states[cut], whole), states[-1])


def test_what_moved_there_and_back_vanishes() -> None:
    states, deltas = lineage(5, 3, 0.02, back=True)
    whole = merged_of(deltas)
    assert sum(delta.manifest.changed for delta in deltas) > 10
    assert (whole.manifest.changed, len(whole.manifest.tensors), whole.chunks) == (0, 0, {})
    assert_same_bits(applied(states[0], whole), states[0])


def test_planes_replace_and_are_advanced() -> None:
    """A tensor sent whole in the middle: what came before is dropped, what comes after is in it."""
    states, deltas = lineage(1, 3, 0.2)
    whole = encode_anchor(states[2], version=Version(1, 2))
    whole.manifest.anchor, whole.manifest.base_digest = False, states[1].digest()
    whole.manifest.base.CopyFrom(Version(1, 1).to_proto())
    merged = merged_of([deltas[0], whole, deltas[2]])
    assert {entry.codec for entry in merged.manifest.tensors} == {"planes"}
    assert merged.manifest.changed == sum(spec.elements for spec in SPECS)
    assert_same_bits(applied(states[0], merged), states[3])


def test_an_anchor_takes_deltas_in() -> None:
    states, deltas = lineage(7, 3, 0.05)
    whole = merged_of([encode_anchor(states[0], version=Version(1, 0)), *deltas])
    assert whole.manifest.anchor
    empty = HostState.allocate(SPECS)
    apply(empty, whole.manifest, whole.payload())
    assert_same_bits(empty, states[-1])


def test_blocks_of_large_tensors_keep_their_places() -> None:
    spec = [TensorSpec(name="w", dtype="BF16", shape=((1 << 22) + 77,))]
    rng = np.random.default_rng(3)
    states = [HostState.allocate(spec)]
    for _ in range(2):
        states.append(copy_of(states[-1]))
        where = rng.integers(0, (1 << 22) + 77, 500)
        states[-1].open_for_update("w")[where] += 1
    deltas = [
        encode_delta(states[k], states[k + 1], version=Version(1, k + 1), base_version=Version(1, k)) for k in (0, 1)
    ]
    assert_same_bits(applied(states[0], merged_of(deltas)), states[2])


def test_chains_that_cannot_be_merged_say_why() -> None:
    states, deltas = lineage(9, 3, 0.05)
    with pytest.raises(CannotMerge, match=r"1\.1 and 1\.3 do not follow one another"):
        merged_of([deltas[0], deltas[2]])
    with pytest.raises(CannotMerge, match="no delta to the first"):
        merged_of([deltas[0], encode_anchor(states[2], version=Version(1, 2))])
    with pytest.raises(CannotMerge, match="nothing to merge"):
        merged_of([])
    deltas[1].manifest.format += 1
    with pytest.raises(CannotMerge, match="written in formats"):
        merged_of(deltas)


def test_exponent_classes_need_the_base() -> None:
    rng = np.random.default_rng(2)
    spec = [TensorSpec(name="w", dtype="BF16", shape=(1 << 17,))]
    states = [HostState.allocate(spec)]
    states[0].open_for_update("w")[:] = (rng.standard_normal(1 << 17).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    for _ in range(2):
        exponent = (states[-1].view_of("w") >> 7) & 255
        states.append(copy_of(states[-1]))
        small = np.flatnonzero((exponent < 122) & (rng.random(1 << 17) < 0.2))
        states[-1].open_for_update("w")[small] += 1
    deltas = [
        encode_delta(states[k], states[k + 1], version=Version(1, k + 1), base_version=Version(1, k), classes=True)
        for k in (0, 1)
    ]
    assert {entry.codec for delta in deltas for entry in delta.manifest.tensors} == {"class-ulp"}
    with pytest.raises(CannotMerge, match="need their base's values"):
        merged_of(deltas)
    with pytest.raises(CannotMerge, match="do not follow one another"):
        merge([Delta.of(one) for one in deltas], [Delta.of(encode_anchor(states[1], version=Version(1, 0)))])
    start = Delta.of(encode_anchor(states[0], version=Version(1, 0)))
    assert_same_bits(applied(states[0], merge([Delta.of(one) for one in deltas], [start])), states[2])
    assert_same_bits(applied(states[0], merged_of(deltas[:1])), states[1])


def test_a_payload_that_goes_on_behind_its_blocks_is_refused() -> None:
    _, deltas = lineage(11, 2, 0.05)
    entry = deltas[0].manifest.tensors[-1]
    entry.bytes += 3
    longer = Delta(manifest=deltas[0].manifest, read=lambda at, n: (deltas[0].payload() + b"xxx")[at : at + n])
    with pytest.raises(CorruptWeights, match=f"tensor {entry.name}"):
        merge([longer, Delta.of(deltas[1])])


def test_reading_across_chunks() -> None:
    pieces = [b"abcde", b"fgh", b"ijklm"]
    manifest = encode_anchor(HostState.allocate(SPECS), version=Version(1, 0)).manifest
    del manifest.chunks[:]
    for piece in pieces:
        manifest.chunks.add(digest=piece, bytes=len(piece))
    whole, asked = b"".join(pieces), list[tuple[bytes, int, int]]()

    def read_chunk(digest: bytes, offset: int, limit: int) -> bytes:
        asked.append((digest, offset, limit))
        return digest[offset : offset + limit]

    read = payload_reader(manifest, read_chunk)
    for start in range(len(whole)):
        for end in range(start, len(whole) + 1):
            assert read(start, end - start) == whole[start:end]
    asked.clear()
    assert read(4, 5) == b"efghi"
    assert asked == [(b"abcde", 4, 1), (b"fgh", 0, 3), (b"ijklm", 0, 1)]


def test_eight_merged_are_much_smaller_than_eight(capsys: pytest.CaptureFixture[str]) -> None:
    """Updates like Adam's: small weights move by one ULP now and then, the same ones more often."""
    rng = np.random.default_rng(4)
    size = 1 << 20
    spec = [TensorSpec(name="w", dtype="BF16", shape=(size,))]
    states, chance = [HostState.allocate(spec)], rng.beta(0.08, 4.0, size)
    states[0].open_for_update("w")[:] = rng.integers(0x3C00, 0x3F00, size, np.uint16)
    up = rng.random(size) < 0.5
    for _ in range(8):
        states.append(copy_of(states[-1]))
        hit = rng.random(size) < chance
        states[-1].open_for_update("w")[hit & up] += 1
        states[-1].open_for_update("w")[hit & ~up] -= 1
    deltas = [
        encode_delta(old, new, version=Version(1, k + 1), base_version=Version(1, k))
        for k, (old, new) in enumerate(itertools.pairwise(states))
    ]
    whole, singles = merged_of(deltas), sum(delta.manifest.payload_bytes for delta in deltas)
    share = whole.manifest.payload_bytes / singles
    with capsys.disabled():
        print(f"\nmerged 8: {whole.manifest.payload_bytes} of {singles} bytes, {share:.2f}")
    assert share <= 0.55
