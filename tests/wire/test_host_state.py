"""The flat buffer of weights: where things lie, what its digests notice, how checkpoints come in."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from forebay.errors import EXIT_USAGE
from forebay.wire.errors import UnreadableCheckpoint
from forebay.wire.fingerprint import MIXERS
from forebay.wire.float_cast import cast
from forebay.wire.host_state import HostState, TensorSpec
from forebay.wire.version import Version
from forebay.wire.weights import WeightsError, apply, encode_anchor
from tests.wire.making import state_of

_SPECS = [
    TensorSpec(name="b", dtype="BF16", shape=(3, 5)),
    TensorSpec(name="a", dtype="F32", shape=()),
    TensorSpec(name="c", dtype="U8", shape=(0, 7)),
]


def test_tensors_lie_aligned_in_sorted_order() -> None:
    state = HostState.allocate(_SPECS)
    assert state.names == ["a", "b", "c"]
    assert [slot["offset"] for slot in state.layout] == [0, 64, 128]
    assert [slot["nbytes"] for slot in state.layout] == [4, 30, 0]
    assert (state.nbytes, state.model_bytes) == (128, 34)
    assert state.specs == sorted(_SPECS, key=lambda spec: spec.name)
    assert state.bits_of("b").dtype == np.uint16
    assert state.bits_of("b").shape == (15,)
    assert state.bytes_of("a").shape == (4,)
    assert state.bytes_of("b").ctypes.data % 64 == 0
    assert json.loads(json.dumps(state.layout)) == state.layout


def test_names_and_dtypes_are_checked() -> None:
    with pytest.raises(WeightsError, match="twice"):
        HostState.allocate([_SPECS[0], _SPECS[0]])
    with pytest.raises(WeightsError, match="safetensors name"):
        HostState.allocate([TensorSpec(name="x", dtype="bfloat", shape=(1,))])
    with pytest.raises(WeightsError, match="whole bytes"):
        HostState.allocate([TensorSpec(name="x", dtype="F4", shape=(3,))])


def test_another_process_sees_the_same_pages() -> None:
    fd = os.memfd_create("weights")
    try:
        state = HostState.allocate(_SPECS, fd)
        window = HostState.attach(json.loads(json.dumps(state.layout)), fd)
        state.bits_of("b")[3] = 77
        assert window.view_of("b")[3] == 77
        assert window.digest() == state.digest()
        with pytest.raises(ValueError, match="read-only"):
            window.bits_of("b")[3] = 1
        with pytest.raises(WeightsError, match="layout"):
            HostState.attach([*state.layout[1:]], fd)
    finally:
        os.close(fd)


def test_a_digest_covers_names_types_shapes_and_every_bit() -> None:
    def digest(
        name: str = "w", dtype: str = "BF16", shape: tuple[int, ...] = (2, 2), bits: Any = (1, 2, 3, 4)
    ) -> bytes:
        return state_of({name: (dtype, shape, np.array(bits, np.uint16))}).digest()

    others = [digest("v"), digest(dtype="F16"), digest(shape=(4,)), digest(shape=(2, 2, 1)), digest(bits=(1, 2, 3, 5))]
    assert len({digest(), *others}) == 6
    assert digest() == digest()
    assert len(digest()) == 32


def test_a_tensor_digest_is_the_fingerprint_as_described() -> None:
    """A second reading of the description, with Python's integers."""
    content = bytes(range(1, 20))
    state = state_of({"w": ("U8", (19,), np.frombuffer(content, np.uint8))})
    a, b, c, d, e = MIXERS
    first = second = 0
    for index in range(3):
        word = int.from_bytes(content[8 * index : 8 * index + 8], "little")
        mixed = c * (word ^ (a * index + b) % 2**64) % 2**64
        mixed ^= mixed >> 32
        first, second = first + d * mixed, second + e * (mixed ^ mixed >> 29)
    assert state.tensor_digest("w") == struct.pack("<QQ", first % 2**64, second % 2**64)


def test_no_write_goes_unnoticed() -> None:
    state = HostState.allocate(_SPECS)
    before = state.digest()
    bits = state.bits_of("b")
    assert state.digest() == before
    bits[0] = 1  # through a view taken before the last question
    after = state.digest()
    assert after != before
    other = HostState.allocate(_SPECS)
    held = other.digest()
    other.copy_from(state)
    assert other.digest() == after != held
    bits[0] = 0
    assert state.digest() == before
    with pytest.raises(ValueError, match="read-only"):
        state.view_of("b")[0] = 1


def test_copied_digests_do_not_hide_a_write() -> None:
    source, state = HostState.allocate(_SPECS), HostState.allocate(_SPECS)
    bits, held = state.bits_of("b"), source.digest()
    state.copy_from(source)
    bits[0] = 1
    assert state.digest() != held
    source.open_for_update("b")[0] = 1
    assert source.digest() == state.digest()


def test_an_update_is_noticed_through_kept_digests() -> None:
    source, state = HostState.allocate(_SPECS), HostState.allocate(_SPECS)
    source.bits_of("b")[:] = 9
    held = state.digest()
    anchor = encode_anchor(source, version=Version(1, 1))
    apply(state, anchor.manifest, anchor.payload())
    assert state.digest() == source.digest() != held
    assert state.tensor_digest("b") == source.tensor_digest("b")


def test_states_of_other_layout_are_not_copied() -> None:
    with pytest.raises(WeightsError, match="layout"):
        HostState.allocate(_SPECS).copy_from(HostState.allocate(_SPECS[:2]))


def _write(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], header: dict[str, Any] | None = None) -> None:
    """A safetensors file, as its format description says."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header or entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def test_a_checkpoint_of_several_files_is_read_whole(tmp_path: Path) -> None:
    odd = np.arange(5, dtype=np.uint8)
    _write(
        tmp_path / "model-00001-of-00002.safetensors", {"o": ("U8", [5], odd.tobytes()), "w": ("BF16", [2], b"abcd")}
    )
    _write(tmp_path / "model-00002-of-00002.safetensors", {"e": ("F32", [0], b""), "s": ("F32", [], b"\0\0\x80\x3f")})
    state = HostState.from_safetensors(tmp_path)
    assert state.names == ["e", "o", "s", "w"]
    assert state.view_of("w").tobytes() == b"abcd"
    assert state.view_of("o").tolist() == [0, 1, 2, 3, 4]
    cast_state = HostState.from_safetensors(tmp_path, "BF16")
    assert [spec.dtype for spec in cast_state.specs] == ["BF16", "U8", "BF16", "BF16"]
    assert cast_state.view_of("s").tolist() == [0x3F80]


def test_it_reads_what_the_library_writes(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    values = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "h": np.ones(3, np.float16), "n": np.array(3)}
    safetensors.save_file(values, tmp_path / "model.safetensors")
    state = HostState.from_safetensors(str(tmp_path))
    assert state.view_of("w").view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert {spec.name: (spec.dtype, spec.shape) for spec in state.specs} == {
        "h": ("F16", (3,)),
        "n": ("I64", ()),
        "w": ("F32", (2, 3)),
    }


@settings(max_examples=100, deadline=None)
@given(arrays(np.uint32, st.integers(1, 50), elements=st.integers(0, 2**32 - 1)))
def test_casts_round_as_torch_does(bits: Any) -> None:
    torch = pytest.importorskip("torch")
    values = torch.from_numpy(bits.view(np.int32)).view(torch.float32)
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        theirs = values.to(dtype)
        ours = torch.from_numpy(cast(bits, "F32", name).view(np.int16)).view(dtype)
        assert torch.equal(theirs.isnan(), ours.isnan())
        assert torch.equal(theirs.view(torch.int16)[~theirs.isnan()], ours.view(torch.int16)[~ours.isnan()])
        back = torch.from_numpy(cast(cast(bits, "F32", name), name, "F32").view(np.int32)).view(torch.float32)
        assert torch.equal(back[~back.isnan()], theirs.float()[~theirs.isnan()])


_TWO = [2]


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": _TWO, "data_offsets": [0, 80]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": _TWO, "data_offsets": [-8, 0]}},
        {"w": {"dtype": "F32", "shape": [1 << 62, 8], "data_offsets": [0, 8]}},
        {"w": {"dtype": "what", "shape": _TWO, "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": _TWO}},
        {"w": 3},
        [1, 2],
    ],
)
def test_checkpoints_that_lie_are_refused(tmp_path: Path, header: Any) -> None:
    _write(tmp_path / "model.safetensors", {"w": ("F32", _TWO, bytes(8))}, header)
    with pytest.raises(UnreadableCheckpoint, match=r"model\.safetensors: not a readable"):
        HostState.from_safetensors(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x10\0\0\0\0\0\0\0{", b"\x80\x04\x95pickle", b"\x02" + bytes(7) + b"{]"]
)
def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnreadableCheckpoint):
        HostState.from_safetensors(tmp_path)


def test_a_folder_without_weights_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match=r"no .*safetensors") as caught:
        HostState.from_safetensors(tmp_path / "missing")
    assert caught.value.exit_code == EXIT_USAGE
    with pytest.raises(UnreadableCheckpoint, match="expected one of BF16"):
        HostState.from_safetensors(tmp_path, "bfloat16")


def test_a_bit_that_rots_is_found_by_a_recheck() -> None:
    floats, small = np.arange(9, dtype=np.uint16), np.array([1, 2, 3], np.uint8)
    state = state_of({"v": ("BF16", (9,), floats), "w": ("U8", (3,), small)})
    view = state.open_for_update("w")
    state.digest()
    assert state.recheck() == []
    view[1] ^= 4
    assert state.recheck() == ["w"]
