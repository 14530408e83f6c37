"""A version that several processes encode is the version that one would have encoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.wire.host_state import HostState, TensorSpec
from forebay.wire.parts import EncodedPart, join, share_out
from forebay.wire.version import Version
from forebay.wire.weights import apply, check_manifest, encode_anchor, encode_delta

BASE, NEXT = Version(1, 0), Version(1, 1)
NAMES = st.text("abcdz.", min_size=1, max_size=4)
SPECS = st.dictionaries(NAMES, st.integers(0, 5000), min_size=1, max_size=6).map(
    lambda sizes: [TensorSpec(name=name, dtype="BF16", shape=(size,)) for name, size in sizes.items()]
)


def states(specs: Sequence[TensorSpec], seed: int) -> tuple[HostState, HostState]:
    """Weights, and the same after an update of a few of them."""
    random = np.random.default_rng(seed)
    base, new = HostState.allocate(specs), HostState.allocate(specs)
    for spec in specs:
        bits = random.integers(0x3000, 0x4000, spec.elements, np.uint16)
        base.bits_of(spec.name)[:] = bits
        new.bits_of(spec.name)[:] = bits + (random.random(spec.elements) < random.choice([0.0, 0.02, 0.9]))
    return base, new


def part_of(state: HostState, specs: Sequence[TensorSpec]) -> HostState:
    part = HostState.allocate(specs)
    for spec in specs:
        part.bits_of(spec.name)[:] = state.view_of(spec.name)
    return part


@settings(max_examples=60, deadline=None)
@given(specs=SPECS, parts=st.integers(1, 4), seed=st.integers(0, 99), classes=st.booleans())
def test_parts_join_to_the_whole(specs: list[TensorSpec], parts: int, seed: int, classes: bool) -> None:
    base, new = states(specs, seed)
    shares = share_out(specs, parts)
    assert sorted(spec.name for share in shares for spec in share) == sorted(spec.name for spec in specs)
    olds, news = ([part_of(state, share) for share in shares] for state in (base, new))

    anchors = [encode_anchor(old, version=BASE) for old in olds]
    anchor = join([EncodedPart.of(one, old) for one, old in zip(anchors, olds, strict=True)], b"")
    deltas = [
        encode_delta(old, late, version=NEXT, base_version=BASE, classes=classes)
        for old, late in zip(olds, news, strict=True)
    ]
    delta = join([EncodedPart.of(one, late) for one, late in zip(deltas, news, strict=True)], base.digest())

    receiver = HostState.allocate(specs)
    for encoded, expected in ((anchor, base), (delta, new)):
        check_manifest(encoded.manifest)
        apply(receiver, encoded.manifest, encoded.payload())
        assert receiver.digest() == expected.digest() == encoded.manifest.digest
    whole = encode_delta(base, new, version=NEXT, base_version=BASE, classes=classes).manifest
    assert (delta.manifest.changed, delta.manifest.elements) == (whole.changed, whole.elements)
    assert (delta.manifest.model_bytes, delta.manifest.base_digest) == (whole.model_bytes, whole.base_digest)


def test_shares_are_runs_of_about_the_same_size() -> None:
    specs = [TensorSpec(name=f"{n:03}", dtype="BF16", shape=(100 + n,)) for n in range(100)]
    shares = share_out(specs[::-1], 4)
    assert [spec.name for share in shares for spec in share] == [spec.name for spec in specs]
    sizes = [sum(spec.nbytes for spec in share) for share in shares]
    assert max(sizes) - min(sizes) < 2 * specs[-1].nbytes
