"""Weights from the sampler's host copy into the engine: vLLM's side.

The receiver owns a memfd that holds every tensor in checkpoint coordinates. What travels to the workers is a pointer to
it; each maps the bytes and feeds the model's own `load_weights`, so fused and tensor-parallel parameters, and the CPU
backend's repacked ones, are vLLM's business.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from forebay.sampler.torch_dtypes import TORCH_DTYPES


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """There is no rendezvous."""


@dataclass
class HostCopyPointer(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where a version's bytes lie: JSON, never the bytes themselves."""

    path: str  #: what the worker opens, /proc/PID/fd/N of the sampler's memfd
    nbytes: int
    layout: list[dict[str, Any]]  #: one slot a tensor: name, dtype, shape, offset, nbytes
    version: str
    digest: str


class HostCopyTransfer(WeightTransferEngine[NoInit, HostCopyPointer]):  # type: ignore[misc]
    """Installs a whole version from the host copy in one call; on any error the caller puts the old version back."""

    init_info_cls = NoInit
    update_info_cls = HostCopyPointer
    supports_draft_weight_update = False

    model: Any  #: a torch module with vLLM's `load_weights`

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Opens nothing yet: `receive_weights` first proves that the pointer is good, then touches the model."""

    def finish_weight_update(self) -> None:
        """Done in `receive_weights`, so that start, update and finish cannot get out of step."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, but without its device synchronisation where there is no device."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HostCopyPointer) -> None:
        """Load every tensor of the host copy. Raises ValueError when it does not cover the model's parameters.

        Every tensor goes into one `load_weights` call: a partly fed fused module would be finalised half empty.
        """
        with mapped(update_info) as weights:
            expected = {name for name, _ in self.model.named_parameters()}  # tied ones once
            initialize_layerwise_reload(self.model)
            try:
                loaded = self.model.load_weights(iter(weights))
            finally:
                # Also after an error: it clears what was half fed, or the next reload would count that twice.
                finalize_layerwise_reload(self.model, self.model_config)
            _refuse_gaps(expected, loaded)
            if self.device.type == "cpu":
                _repack_tied(self.model, loaded or set())

    def shutdown(self) -> None:
        """Nothing is held between updates."""


@contextlib.contextmanager
def mapped(pointer: HostCopyPointer) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors that `pointer` names, as views of a private mapping. Raises OSError or ValueError."""
    copy_fd = os.open(pointer.path, os.O_RDONLY)
    try:
        held_bytes = os.fstat(copy_fd).st_size
        if held_bytes < pointer.nbytes:
            raise ValueError(f"host copy {pointer.path} holds {held_bytes} bytes, its pointer says {pointer.nbytes}")
        # Private, because torch wants writable memory; nothing writes, so nothing is copied.
        memory = mmap.mmap(copy_fd, pointer.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(copy_fd)
    yield [(slot["name"], _view(memory, slot)) for slot in pointer.layout]
    # Unmapped when the last view is gone; closing it here would fail if vLLM kept one a moment longer.


def _view(memory: mmap.mmap, slot: dict[str, Any]) -> torch.Tensor:
    dtype = TORCH_DTYPES[slot["dtype"]]
    count = slot["nbytes"] // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=slot["offset"]).view(slot["shape"])


def _refuse_gaps(expected: set[str], loaded: set[str] | None) -> None:
    """Some architectures report nothing: those are taken at their word."""
    missing = sorted(expected - loaded) if loaded else []
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ValueError(f"published weights leave {len(missing)} of the engine's parameters unset: {shown}")


def _repack_tied(model: Any, loaded: set[str]) -> None:
    """On the CPU a tied output head multiplies with its own packed copy, which vLLM's reload leaves at the old weights.

    Its `weight` is the embedding's, just loaded; only the packing has to be done again.
    """
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear") and layer.weight.numel() and f"{name}.weight" not in loaded:
            layer.quant_method.process_weights_after_loading(layer)
