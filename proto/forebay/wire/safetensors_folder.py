"""The weights of an ordinary checkpoint folder, read without torch (format: huggingface/safetensors, README)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.wire.dtype import Bits, unit
from forebay.wire.errors import UnreadableCheckpoint, WeightsError
from forebay.wire.float_cast import CASTABLE, cast
from forebay.wire.host_state import HostState, TensorSpec, blocks_of
from forebay.wire.manifest import MAX_DIMENSIONS

_MAX_HEADER_BYTES = 100_000_000  #: the format's own bound
_CAST_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    spec: TensorSpec
    file: Path
    begin: int


def read_folder(folder: Path, dtype: str | None) -> HostState:
    """Every tensor of every *.safetensors file in `folder`. Raises UnreadableCheckpoint."""
    if dtype is not None and dtype not in CASTABLE:
        raise UnreadableCheckpoint(f"dtype {dtype!r}: expected one of {', '.join(CASTABLE)}")
    stored = [tensor for file in _files(folder) for tensor in _read_header(file)]
    state = HostState.allocate(_as_held(tensor.spec, dtype) for tensor in stored)
    for tensor in stored:
        _read_tensor(tensor, state.open_for_update(tensor.spec.name), _as_held(tensor.spec, dtype).dtype)
    return state


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnreadableCheckpoint(f"{folder}: no *.safetensors file there; expected an ordinary checkpoint folder")
    return files


def _as_held(spec: TensorSpec, dtype: str | None) -> TensorSpec:
    if dtype is None or spec.dtype not in CASTABLE:
        return spec
    return TensorSpec(name=spec.name, dtype=dtype, shape=spec.shape)


def _read_header(file: Path) -> list[_Stored]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"header of {header_bytes} bytes in a file of {size}")
            header = json.loads(stream.read(header_bytes))
        return _tensors(file, header, begin=8 + header_bytes, size=size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, WeightsError) as error:
        raise UnreadableCheckpoint(f"{file}: not a readable safetensors file ({error})") from error


def _tensors(file: Path, header: dict[str, Any], *, begin: int, size: int) -> list[_Stored]:
    stored = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        spec = TensorSpec(name=name, dtype=str(entry["dtype"]), shape=_shape(entry["shape"]))
        start, end = (int(offset) for offset in entry["data_offsets"])
        if start < 0 or end - start != spec.nbytes or begin + end > size:
            raise ValueError(f"tensor {name}: bytes {start} to {end} do not hold {spec.dtype} {list(spec.shape)}")
        stored.append(_Stored(spec=spec, file=file, begin=begin + start))
    return stored


def _shape(shape: list[int]) -> tuple[int, ...]:
    if len(shape) > MAX_DIMENSIONS or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"shape {shape}")
    return tuple(shape)


def _read_tensor(tensor: _Stored, target: Bits, dtype: str) -> None:
    if not math.prod(tensor.spec.shape):
        return
    mapped: NDArray[np.uint8] = np.memmap(tensor.file, np.uint8, "r", tensor.begin, (tensor.spec.nbytes,))
    source = mapped.view(unit(tensor.spec.dtype))
    if tensor.spec.dtype == dtype:
        target[:] = source
        return
    done = 0
    for block in blocks_of(source, _CAST_BLOCK_BYTES):
        target[done : done + len(block)] = cast(block, tensor.spec.dtype, dtype)
        done += len(block)
