"""Random sequences of updates are exact, and so are hundreds in a row, whatever the elements are.

`make prove` runs 10,000 sequences and 500 versions a codec, `make test` a few of each. With -s the figures are printed,
as JSON.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from forebay.wire import block, plain
from forebay.wire.dtype import is_float, unit
from forebay.wire.float_cast import cast
from forebay.wire.host_state import HostState, TensorSpec
from forebay.wire.merge import CannotMerge, Delta, merge
from forebay.wire.version import Version
from forebay.wire.weights import Encoded, apply, encode_anchor, encode_delta

Bits = Any
Random = np.random.Generator

#: Mantissa bits of floats; the others are integers.
MANTISSAS = {"BF16": 7, "F16": 10, "F32": 23, "F64": 52, "F8_E4M3": 3, "F8_E5M2": 2}
DTYPES = (*MANTISSAS, "I8", "U8", "I16", "I32", "I64", "BOOL")
TIED = ("head.tied", "embed.tied")  #: two names for the same elements, as in a checkpoint with both
CODECS = {"gap-ulp", "class-ulp", "bitmask-ulp", "xor", "planes"}
MERGED = 8  #: versions
LONG = pytest.mark.prove, pytest.mark.timeout(3600)


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=LONG)])
def test_random_sequences_are_exact(count: int) -> None:
    told = Counter[str]()
    for seed in range(count):
        told += _prove_sequence(np.random.default_rng(seed), twin=seed % 10 == 0)
    assert set(told) >= CODECS
    print(json.dumps({"sequences": count, **told}))


@pytest.mark.parametrize("classes", [False, True], ids=["gaps", "classes"])
@pytest.mark.parametrize("versions", [16, pytest.param(500, marks=LONG)])
def test_many_versions_in_a_row_do_not_drift(versions: int, classes: bool) -> None:
    model = _Training(np.random.default_rng(versions))
    sent, chain = model.state(), list[Encoded]()
    each, every = _copy(sent), _copy(sent)  # one receiver takes every version, the other what eight make together
    last, told = _copy(sent), Counter[str]()
    for step in range(1, versions + 1):
        model.step()
        new = model.state()
        encoded = _delta(sent, new, step, classes=classes)
        apply(each, encoded.manifest, encoded.payload())
        assert each.digest() == encoded.manifest.digest == _recomputed(each)
        chain, sent = [*chain, encoded], new
        told.update(_facts(encoded))
        if len(chain) == MERGED or step == versions:
            whole = _merged(chain, last, [])
            apply(every, whole.manifest, whole.payload())
            assert every.digest() == _recomputed(every) == each.digest()
            told["merged bytes"] += whole.manifest.payload_bytes
            chain, last = [], _copy(new)
    assert _same(each, new)
    assert _same(every, new)
    print(json.dumps({"versions": versions, "codec": "classes" if classes else "gaps", **told}))


def _prove_sequence(rng: Random, *, twin: bool) -> Counter[str]:
    """One model over some versions: each update, the way back, and what some of them make together."""
    states = _lineage(rng)
    anchor = encode_anchor(states[0], version=Version(1, 0))
    receiver, deltas = HostState.allocate(states[0].specs), list[Encoded]()
    apply(receiver, anchor.manifest, anchor.payload())
    assert _same(receiver, states[0])
    told = Counter[str](tensors=len(receiver.names))
    for step, (base, new) in enumerate(pairwise(states), 1):
        classes = bool(rng.integers(2))
        deltas.append(_delta(base, new, step, classes=classes))
        if twin:
            _same_without_numba(deltas[-1], base, new, step, classes=classes)
        _apply_and_return(receiver, base, new, deltas[-1])
        told.update(_facts(deltas[-1]))
    first, end = sorted(rng.choice(len(states), 2, replace=False).tolist())
    skipping = _copy(states[first])
    whole = _merged(deltas[first:end], states[0], deltas[:first])
    apply(skipping, whole.manifest, whole.payload())
    assert _same(skipping, states[end])
    return told


def _apply_and_return(receiver: HostState, base: HostState, new: HostState, delta: Encoded) -> None:
    undo = apply(receiver, delta.manifest, delta.payload(), keep_undo=True)
    assert _same(receiver, new)
    assert undo.roll_back()
    assert _same(receiver, base)
    apply(receiver, delta.manifest, delta.payload())
    assert _same(receiver, new)


def _same_without_numba(delta: Encoded, base: HostState, new: HostState, step: int, *, classes: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "loops", lambda: plain)
        slow = _delta(base, new, step, classes=classes)
        receiver = _copy(base)
        apply(receiver, delta.manifest, delta.payload())
    assert slow.payload() == delta.payload()
    assert slow.manifest == delta.manifest
    assert _same(receiver, new)


def _delta(base: HostState, new: HostState, step: int, *, classes: bool) -> Encoded:
    return encode_delta(base, new, version=Version(1, step), base_version=Version(1, step - 1), classes=classes)


def _merged(chain: Sequence[Encoded], oldest: HostState, behind: Sequence[Encoded]) -> Encoded:
    """From the payloads alone where that can be, else with the values that `oldest` and `behind` lead to."""
    deltas = [Delta.of(encoded) for encoded in chain]
    try:
        return merge(deltas)
    except CannotMerge:
        first = Version.from_proto((behind or chain)[0].manifest.base)
        anchor = encode_anchor(oldest, version=first)
        return merge(deltas, [Delta.of(encoded) for encoded in (anchor, *behind)])


def _facts(encoded: Encoded) -> Counter[str]:
    manifest = encoded.manifest
    codecs = Counter(entry.codec for entry in manifest.tensors)
    return codecs + Counter(updates=1, changed=manifest.changed, bytes=manifest.payload_bytes)


def _copy(state: HostState) -> HostState:
    copy = HostState.allocate(state.specs)
    copy.copy_from(state)
    return copy


def _recomputed(state: HostState) -> bytes:
    """The digest worked out from the bytes alone."""
    fresh = HostState.allocate(state.specs)
    for name in state.names:
        fresh.open_for_update(name)[:] = state.view_of(name)
    return fresh.digest()


def _same(left: HostState, right: HostState) -> bool:
    """Bit for bit, and the digests are those of the bits."""
    bits = all(left.view_of(name).tobytes() == right.view_of(name).tobytes() for name in right.names)
    return bits and left.digest() == right.digest() and not left.recheck()


def _lineage(rng: Random) -> list[HostState]:
    """A model of any types and shapes, and up to four versions that follow it."""
    states = [HostState.allocate(_specs(rng))]
    for spec in states[0].specs:
        states[0].open_for_update(spec.name)[:] = _any_bits(rng, spec)
    _tie(states[0])
    for _ in range(int(rng.integers(1, 5))):
        states.append(_copy(states[-1]))
        for spec in states[-1].specs:
            _change(rng, states[-1].open_for_update(spec.name), spec, states[0].view_of(spec.name))
        _tie(states[-1])
    return states


def _specs(rng: Random) -> list[TensorSpec]:
    """Ranks 0 to 5, nothing in some, now and then one with thousands of elements, and a tied pair."""
    specs = []
    for number in range(int(rng.integers(1, 5))):
        shape = tuple(rng.integers(0 if rng.random() < 0.1 else 1, 6, int(rng.integers(0, 6))).tolist())
        if rng.random() < 0.25:
            shape = (int(rng.integers(1_000, 20_000)),)
        dtype = str(rng.choice(DTYPES if rng.random() < 0.5 else DTYPES[:3]))
        specs.append(TensorSpec(name=f"w{number}", dtype=dtype, shape=shape))
    if rng.random() < 0.3:
        dtype = str(rng.choice(DTYPES))
        specs += [TensorSpec(name=name, dtype=dtype, shape=(7, 30)) for name in TIED]
    return specs


def _tie(state: HostState) -> None:
    if TIED[0] in state.names:
        state.open_for_update(TIED[1])[:] = state.view_of(TIED[0])


def _any_bits(rng: Random, spec: TensorSpec) -> Bits:
    """Weights like a model's, any bits at all, or one value everywhere."""
    dtype, count = unit(spec.dtype), math.prod(spec.shape)
    how = rng.integers(4)
    if how >= 2 and spec.dtype in ("BF16", "F16", "F32"):
        values = (rng.standard_normal(count) * 0.02).astype(np.float32).view(np.uint32)
        return values if spec.dtype == "F32" else cast(values, "F32", spec.dtype)
    bits = rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    return np.full(count, bits[:1]) if how == 1 and count else bits


def _change(rng: Random, bits: Bits, spec: TensorSpec, first: Bits) -> None:
    """One of the ways in which weights change, and some in which they should not."""
    where = np.flatnonzero(rng.random(len(bits)) < rng.choice([0.001, 0.02, 0.3, 1.0]))
    how = rng.choice(["same", "step", "small", "small", "special", "sign", "any", "back"])
    if how == "step":
        bits[where] += rng.choice(np.array([1, -1, 2, -300], np.int64), len(where)).astype(bits.dtype)
    elif how == "small":  # as an optimizer does: what is small changes more
        magnitudes = bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
        bits[magnitudes <= np.quantile(magnitudes, 0.2) if len(bits) else where] += 1
    elif how == "special":
        bits[where] = rng.choice(_specials(spec.dtype), len(where))
    elif how == "sign":
        bits[where] ^= bits.dtype.type(1 << (8 * bits.itemsize - 1))
    elif how == "any":
        bits[where] = _any_bits(rng, spec)[where]
    elif how == "back":
        bits[:] = first


def _specials(dtype: str) -> Bits:
    """Zeros, infinities, NaN payloads, subnormals, the largest and smallest; of integers, the ends and around 0."""
    top = 8 * unit(dtype).itemsize - 1
    sign, full = 1 << top, (1 << top) - 1
    mantissa = (1 << MANTISSAS[dtype]) - 1 if is_float(dtype) else 0
    infinity = full - mantissa
    each = [0, 1, mantissa, mantissa + 1, infinity - 1, infinity, infinity + 1 if mantissa else full, full]
    return np.array([value | either for value in each for either in (0, sign)], unit(dtype))


class _Training:
    """Masters in float32 that an optimizer moves a little every step, seen in the types that models have."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._masters = (rng.standard_normal(60_000) * 0.02).astype(np.float32)
        self._moment = np.zeros_like(self._masters)
        self._count = 0

    def step(self) -> None:
        self._count += 1
        self._moment = 0.9 * self._moment + 0.1 * self._rng.standard_normal(len(self._masters)).astype(np.float32)
        self._masters -= np.float32(1e-6) * self._moment / np.float32(0.2)

    def state(self) -> HostState:
        """The weights now; a few NaN, infinities and both zeros come and go, and a counter counts."""
        masters = self._masters.view(np.uint32)
        parts = {
            ("bf16", "BF16"): cast(masters[:40_000], "F32", "BF16"),
            ("f16", "F16"): cast(masters[40_000:50_000], "F32", "F16"),
            ("f32", "F32"): masters[50_000:51_000],
            ("f8", "F8_E4M3"): cast(masters[51_000:], "F32", "BF16").view(np.uint8)[1::2],
            ("special", "BF16"): np.roll(_specials("BF16"), self._count),
            ("counter", "I64"): np.array([self._count]),
            ("nothing", "F32"): np.zeros(0, np.uint32),
        }
        state = HostState.allocate(
            TensorSpec(name=name, dtype=dtype, shape=(len(bits),)) for (name, dtype), bits in parts.items()
        )
        for (name, _), bits in parts.items():
            target = state.open_for_update(name)
            target[:] = bits.view(target.dtype)
        return state
