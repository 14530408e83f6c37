"""A model's weights in host memory: one flat buffer, every tensor at a known place."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from forebay.wire import fingerprint
from forebay.wire.digest import state_digest
from forebay.wire.dtype import Bits, bits_per_element, unit
from forebay.wire.errors import CorruptWeights, WeightsError
from forebay.wire.loops import loops
from forebay.wire.parallel import in_order

ALIGNMENT_BYTES = 64
_PIECE_BYTES = 1 << 23  #: fingerprinted by one thread; a multiple of the word


class Slot(TypedDict):
    """Where a tensor lies in the buffer; a plain dict, so that JSON carries it to another process."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor's name, element type (safetensors spelling: BF16, F32, ...) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in memory. Raises WeightsError when sub-byte elements do not fill whole bytes."""
        bits = self.elements * bits_per_element(self.dtype)
        if bits % 8:
            raise WeightsError(f"tensor {self.name}: {self.elements} elements of {self.dtype} are no whole bytes")
        return bits // 8


class HostState:
    """Every tensor of a model, in sorted-name order, 64-byte aligned, in one buffer (memory or a shared file).

    Digests are kept until a tensor is written. Whoever takes a writable view (`bytes_of`, `bits_of`) may write at any
    later time, so that tensor's digest is computed anew at each question; `view_of` is for readers.
    """

    def __init__(self, layout: Sequence[Slot], buffer: NDArray[np.uint8]) -> None:
        self._buffer = buffer
        self._slots = {slot["name"]: slot for slot in layout}
        self._digests: dict[str, bytes] = {}
        self._exposed: set[str] = set()
        self._damage: str | None = None

    @classmethod
    def allocate(cls, specs: Iterable[TensorSpec], fd: int | None = None) -> HostState:
        """Zeroed room for `specs`; in the file `fd` (a memfd, say), which is set to the size needed, when given."""
        layout, nbytes = _lay_out(specs)
        if fd is None:
            return cls(layout, _as_bytes(mmap.mmap(-1, max(nbytes, 1)), nbytes))
        os.ftruncate(fd, max(nbytes, 1))
        return cls(layout, _as_bytes(mmap.mmap(fd, max(nbytes, 1)), nbytes))

    @classmethod
    def attach(cls, layout: Sequence[Slot], fd: int) -> HostState:
        """A read-only window on a state that another process keeps in the file `fd`. Raises WeightsError."""
        specs = [TensorSpec(name=s["name"], dtype=s["dtype"], shape=tuple(s["shape"])) for s in layout]
        expected, nbytes = _lay_out(specs)
        if expected != list(layout) or os.fstat(fd).st_size < nbytes:
            raise WeightsError("shared weights: the layout does not fit the file; were both made by the same version?")
        return cls(expected, _as_bytes(mmap.mmap(fd, max(nbytes, 1), prot=mmap.PROT_READ), nbytes))

    @classmethod
    def from_safetensors(cls, folder: str | os.PathLike[str], dtype: str | None = None) -> HostState:
        """The weights of a checkpoint folder. With `dtype` (F32, F16 or BF16), floats of these types are cast to it,
        rounding to nearest even. Raises UnreadableCheckpoint."""
        from forebay.wire.safetensors_folder import read_folder

        return read_folder(Path(folder), dtype)

    @property
    def layout(self) -> list[Slot]:
        """Where each tensor lies, in order."""
        return list(self._slots.values())

    @property
    def names(self) -> list[str]:
        """Tensor names, sorted."""
        return list(self._slots)

    @property
    def specs(self) -> list[TensorSpec]:
        """What `allocate` needs for another state of this shape."""
        return [TensorSpec(name=s["name"], dtype=s["dtype"], shape=tuple(s["shape"])) for s in self._slots.values()]

    @property
    def nbytes(self) -> int:
        """Size of the buffer, alignment included."""
        return self._buffer.nbytes

    @property
    def model_bytes(self) -> int:
        """Size of the tensors alone."""
        return sum(slot["nbytes"] for slot in self._slots.values())

    @property
    def damaged(self) -> bool:
        """True after an update failed half-way: reload before anything is served from here."""
        return self._damage is not None

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """Writable bytes of a tensor, shape [nbytes]. Raises KeyError."""
        self._exposed.add(name)
        self._digests.pop(name, None)
        return self._bytes(name)

    def bits_of(self, name: str) -> Bits:
        """Writable elements of a tensor as unsigned integers of its width, shape [elements]. Raises KeyError."""
        return self.bytes_of(name).view(unit(self._slots[name]["dtype"]))

    def view_of(self, name: str) -> Bits:
        """Like `bits_of`, for reading. Raises KeyError."""
        bits = self._bytes(name).view(unit(self._slots[name]["dtype"]))
        bits.flags.writeable = False
        return bits

    def tensor_digest(self, name: str) -> bytes:
        """The fingerprint of a tensor's bytes, 16 bytes (`forebay.wire.fingerprint`). Raises KeyError."""
        known = self._digests.get(name)
        if known is None:
            known = fingerprint.packed(_fingerprint(self._bytes(name)))
            self.learn_digest(name, known)
        return known

    def digest(self) -> bytes:
        """32 bytes over names, dtypes, shapes and contents. Raises CorruptWeights when the state is damaged."""
        return self.digest_with(self.tensor_digests())

    def tensor_digests(self) -> dict[str, bytes]:
        """The digest of every tensor by name. Raises CorruptWeights when the state is damaged."""
        self.require_sound()
        return {name: self.tensor_digest(name) for name in self._slots}

    def digest_with(self, digests: Mapping[str, bytes]) -> bytes:
        """What `digest` would be if the tensors had these digests."""
        return state_digest((s["name"], s["dtype"], s["shape"], digests[s["name"]]) for s in self._slots.values())

    def copy_from(self, other: HostState) -> None:
        """Take over the contents of a state with the same layout, and its soundness. Raises WeightsError."""
        other.require_sound()
        if self.layout != other.layout:
            raise WeightsError("copy between states of different layout: same tensors, dtypes and shapes are needed")
        np.copyto(self._buffer, other._buffer)
        self._damage = None
        kept = {name: digest for name, digest in other._digests.items() if name not in self._exposed}
        self._digests = kept

    def require_sound(self) -> None:
        """Raises CorruptWeights when an update failed half-way."""
        if self._damage is not None:
            raise CorruptWeights(
                f"these weights are damaged ({self._damage}): reload them from an anchor or checkpoint"
            )

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        slot = self._slots[name]
        return self._buffer[slot["offset"] : slot["offset"] + slot["nbytes"]]

    def known_digests(self) -> dict[str, bytes]:
        """Those that need not be worked out."""
        return dict(self._digests)

    def recheck(self) -> list[str]:
        """Names of the tensors that are not what their digests say: memory that went bad beside the updates."""
        known = dict(self._digests)
        return [name for name, digest in known.items() if fingerprint.packed(_fingerprint(self._bytes(name))) != digest]

    # For those who write once and keep no view: updates and readers of checkpoints.

    def learn_digest(self, name: str, digest: bytes) -> None:
        """Take over what somebody has worked out while he read or wrote the tensor."""
        if name not in self._exposed:
            self._digests[name] = digest

    def open_for_update(self, name: str) -> Bits:
        """Writable elements whose digest is forgotten now; the caller must not keep the view. Raises KeyError."""
        self._digests.pop(name, None)
        return self._bytes(name).view(unit(self._slots[name]["dtype"]))

    def mark_damaged(self, problem: str) -> None:
        """Nothing may be served from here until `mark_sound` or `copy_from`."""
        self._damage = problem
        self._digests.clear()

    def mark_sound(self, digests: Mapping[str, bytes]) -> None:
        """Every tensor was verified or put back, and these digests (of some or all tensors) are what stands there."""
        self._damage = None
        self._digests = {name: digest for name, digest in digests.items() if name not in self._exposed}


def _lay_out(specs: Iterable[TensorSpec]) -> tuple[list[Slot], int]:
    layout: list[Slot] = []
    offset = 0
    for spec in sorted(specs, key=lambda spec: spec.name):
        if layout and layout[-1]["name"] == spec.name:
            raise WeightsError(f"tensor {spec.name} is there twice")
        layout.append(Slot(name=spec.name, dtype=spec.dtype, shape=list(spec.shape), offset=offset, nbytes=spec.nbytes))
        offset += -(-spec.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return layout, offset


def _fingerprint(content: NDArray[np.uint8]) -> fingerprint.Sums:
    return fingerprint.total(in_order(lambda start: _piece(content, start), range(0, len(content), _PIECE_BYTES)))


def _piece(content: NDArray[np.uint8], start: int) -> fingerprint.Sums:
    sums: fingerprint.Sums = loops().fingerprint(content[start : start + _PIECE_BYTES], start // 8)
    return sums


def _as_bytes(memory: mmap.mmap, nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8, count=nbytes)


def blocks_of(bits: Bits, block_bytes: int) -> Iterator[Bits]:
    """`bits` cut into views of at most `block_bytes`."""
    size = block_bytes // bits.itemsize
    for start in range(0, len(bits), size):
        yield bits[start : start + size]
