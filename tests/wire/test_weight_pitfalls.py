"""What went wrong in other systems' weight updates, one test each: the issue stands above it.

Those that need a buffer are in tests/buffer/test_weight_pitfalls.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from forebay.wire import block, compiled, parallel, plain
from forebay.wire.errors import WireError
from forebay.wire.fingerprint import minus
from forebay.wire.loops import ClassDifference, loops
from forebay.wire.weights import CorruptWeights, WrongBase, apply, encode_anchor, encode_delta
from tests.wire.making import NEW, OLD, copy_of, state_of

_RANDOM = np.random.default_rng(11)


def _state() -> Any:
    return state_of(
        {
            "embed": ("BF16", (300, 100), _RANDOM.integers(0x3C00, 0x3F00, 30_000, np.uint16)),
            "norm": ("F32", (100,), _RANDOM.integers(0x3F000000, 0x3F800000, 100, np.uint32)),
            "scale": ("F8_E4M3", (64,), _RANDOM.integers(0, 256, 64, np.uint8)),
        }
    )


# NVIDIA-NeMo/RL#3274: half of an update was applied, the retry of its XOR turned those bits back.
def test_an_update_that_failed_half_way_is_tried_again_from_whole_weights() -> None:
    base = _state()
    new = copy_of(base, lambda name, bits: np.bitwise_xor(bits, bits.dtype.type(64), out=bits))
    delta = encode_delta(base, new, version=NEW, base_version=OLD)
    assert {entry.codec for entry in delta.manifest.tensors} == {"xor"}
    evil, receiver = type(delta.manifest)(), copy_of(base)
    evil.CopyFrom(delta.manifest)
    evil.tensors[-1].digest = bytes(16)  # found when all else is applied
    with pytest.raises(CorruptWeights, match="as before"):
        apply(receiver, evil, delta.payload(), keep_undo=True)
    apply(receiver, delta.manifest, delta.payload(), keep_undo=True)
    assert receiver.digest() == new.digest()
    with pytest.raises(WrongBase):
        apply(receiver, delta.manifest, delta.payload(), keep_undo=True)
    assert receiver.digest() == new.digest()
    assert receiver.recheck() == []


# NVIDIA-NeMo/RL#2444: wide gaps between changes took a branch that no test had ever entered.
@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 65534, 65535, 65536, (1 << 23) - 2])
@pytest.mark.parametrize("make", [plain, compiled], ids=["numpy", "numba"])
def test_gaps_of_every_width_lead_to_the_same_place(
    gap: int, make: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "loops", lambda: make)
    old = np.zeros(gap + 2, np.uint8)
    new = old.copy()
    new[[0, gap + 1]] = 7
    found = make.difference(old, new, is_float=False, first_word=0)
    packed = block._sparse(found.gaps, found.escapes, found.steps)
    opened = block.open_block(memoryview(packed), len(old), 1)
    block.apply_block(old, opened, "U8")
    assert np.array_equal(old, new)


# huggingface/trl#5937 (a): the periodic anchor had only the tensors that had changed.
def test_an_anchor_holds_also_what_never_changed() -> None:
    base = _state()
    new = copy_of(base, lambda name, bits: np.copyto(bits[:1], bits[:1] + 1) if name == "norm" else None)
    delta, anchor = encode_delta(base, new, version=NEW, base_version=OLD), encode_anchor(new, version=NEW)
    assert [entry.name for entry in delta.manifest.tensors] == ["norm"]
    assert [entry.name for entry in anchor.manifest.tensors] == new.names
    fresh = type(new).allocate(new.specs)
    apply(fresh, anchor.manifest, anchor.payload())
    assert fresh.digest() == new.digest()


# huggingface/trl#5937 (b): of several steps between two updates only the last one's changes were sent.
def test_a_delta_has_the_changes_of_all_steps_since_the_last_one_sent() -> None:
    sent = _state()
    receiver, trained = copy_of(sent), copy_of(sent)
    for step in range(5):
        trained = copy_of(trained, partial(_nudge, step))
    delta = encode_delta(sent, trained, version=NEW, base_version=OLD)
    apply(receiver, delta.manifest, delta.payload())
    assert receiver.digest() == trained.digest()
    assert delta.manifest.changed == sum(int(np.count_nonzero(np.arange(n) % 9 < 5)) for n in (30_000, 100, 64))


# huggingface/trl#5937 (d): types came back from the metadata as text and were compared as such.
def test_a_tensor_of_another_type_of_the_same_width_is_refused() -> None:
    base = _state()
    delta = encode_delta(base, copy_of(base, lambda _, bits: bits.fill(1)), version=NEW, base_version=OLD)
    delta.manifest.tensors[0].dtype = "F16"
    with pytest.raises(CorruptWeights, match="embed F16"):
        apply(base, delta.manifest, delta.payload())
    assert base.recheck() == []


def test_what_runs_already_is_waited_for_when_the_next_job_is_malformed() -> None:
    """Else it would write after the weights were put back."""
    begun, raised, ended = threading.Event(), threading.Event(), threading.Event()

    def jobs() -> Iterator[int]:
        yield 1
        assert begun.wait(60)
        raised.set()
        raise WireError("malformed")

    def work(job: int) -> None:
        begun.set()
        raised.wait(60)
        sum(range(3_000_000))  # what is left to do
        ended.set()

    with pytest.raises(WireError, match="malformed"):
        list(parallel.in_order(work, jobs()))
    assert ended.is_set()


# verl#6974: 18,000 small tensors of experts, each of which cost a round of everything.
def test_small_tensors_are_worked_on_by_the_megabyte() -> None:
    batches = list(parallel.batched([4096] * 18_000, lambda size: size))
    assert sum(map(len, batches)) == 18_000
    assert len(batches) <= 36


# grail: a digest of all the weights stood in the way of every update.
def test_an_update_reads_only_what_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    base = _state()
    new = copy_of(base, lambda name, bits: np.copyto(bits[::500], bits[::500] + 1))
    delta = encode_delta(base, new, version=NEW, base_version=OLD)
    receiver = copy_of(base)
    assert receiver.digest() == base.digest()
    monkeypatch.setattr(loops(), "fingerprint", _never)
    apply(receiver, delta.manifest, delta.payload())
    assert receiver.digest() == delta.manifest.digest
    monkeypatch.undo()
    assert receiver.recheck() == []


# A class and the rest may name the same element only in a payload that lies: it must end in an error, not in memory.
def test_an_element_that_changes_twice_is_refused_without_harm() -> None:
    for make in (plain, compiled):
        target = np.full(4096, 1, np.uint8)
        lying = ClassDifference(
            bounds=np.array([5], np.int64),
            counts=np.array([4096, 4096], np.int64),
            gaps=np.zeros(8192, np.uint32),
            steps=np.full(8192, 2, np.uint8),
        )
        before = make.fingerprint(target, 0)
        change = make.class_advance(target, lying, 3, first_word=0)
        assert minus(make.fingerprint(target, 0), before) == change
        with pytest.raises(WireError, match="changed position"):
            make.class_advance(target[:100], lying, 3, first_word=0)


def _nudge(first: int, name: str, bits: Any) -> None:
    bits[first::9] += 1


def _never(*_: Any) -> Any:
    raise AssertionError("the whole tensor was read")
