"""The weights as they leave the learner: one host copy in the published dtype, named as in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from forebay.learner.lora import adapter_tensors, has_adapter
from forebay.wire.weights import HostState, TensorSpec

#: Elements that are brought together at once.
BUCKET = 50_000_000
#: safetensors' names of the dtypes that weights have.
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def published_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every parameter and saved buffer by its checkpoint name; tied weights stand once, as in the checkpoint. Of a
    model with an adapter, the adapter alone."""
    if has_adapter(model):
        return adapter_tensors(model)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied}


def host_specs(model: PreTrainedModel, dtype: torch.dtype) -> list[TensorSpec]:
    """What `HostState.allocate` needs to hold `model` in `dtype`."""
    return [
        TensorSpec(name=name, dtype=DTYPES[dtype], shape=tuple(getattr(tensor, "ds_shape", tensor.shape)))
        for name, tensor in published_tensors(model).items()
    ]


def copy_to_host(model: PreTrainedModel, state: HostState) -> None:
    """Write the weights that `state` has room for into it, rounding to nearest even where its dtype is narrower.

    Under ZeRO 3 a collective call, whatever each rank has room for: the parts of a weight come together.
    """
    with torch.no_grad():
        room = host_tensors(state)
        for some in whole_tensors(model):
            for name in some.keys() & room.keys():
                room[name].copy_(some[name])


def whole_tensors(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """A few of `published_tensors` at a time, whole until the next ones are asked for. A collective iteration."""
    for some in _buckets(published_tensors(model)):
        with _whole(some.values()):
            yield some


def _buckets(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """A few at a time: what comes together has to fit beside everything else."""
    bucket, size = dict[str, torch.Tensor](), 0
    for name, tensor in tensors.items():
        if bucket and size + _elements(tensor) > BUCKET:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += _elements(tensor)
    yield bucket


def _elements(tensor: torch.Tensor) -> int:
    return int(getattr(tensor, "ds_numel", tensor.numel()))


def _whole(tensors: Iterable[torch.Tensor]) -> Any:
    """While it is open, weights that ZeRO 3 has taken apart are whole."""
    parted = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not parted:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(parted)


def host_tensors(state: HostState) -> dict[str, torch.Tensor]:
    """Tensors on the state's own memory, for writing: the state forgets the digests it knew."""
    dtypes = {spelled: dtype for dtype, spelled in DTYPES.items()}
    return {
        slot["name"]: torch.from_numpy(state.open_for_update(slot["name"]))
        .view(dtypes[slot["dtype"]])
        .view(slot["shape"])
        for slot in state.layout
    }
