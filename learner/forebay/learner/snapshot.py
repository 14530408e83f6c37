"""The weights as they leave the learner: one host copy in the published dtype, named as in the checkpoint."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from forebay.wire.weights import HostState, TensorSpec

#: safetensors' names of the dtypes that weights have.
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def published_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every parameter and saved buffer by its checkpoint name; tied weights stand once, as in the checkpoint."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def host_specs(model: PreTrainedModel, dtype: torch.dtype) -> list[TensorSpec]:
    """What `HostState.allocate` needs to hold `model` in `dtype`."""
    return [
        TensorSpec(name=name, dtype=DTYPES[dtype], shape=tuple(tensor.shape))
        for name, tensor in published_tensors(model).items()
    ]


def copy_to_host(model: PreTrainedModel, state: HostState) -> None:
    """Write the weights into `state`, rounding to nearest even where its dtype is narrower."""
    with torch.no_grad():
        room = host_tensors(state)
        for name, tensor in published_tensors(model).items():
            room[name].copy_(tensor)


def host_tensors(state: HostState) -> dict[str, torch.Tensor]:
    """Tensors on the state's own memory, for writing: the state forgets the digests it knew."""
    dtypes = {spelled: dtype for dtype, spelled in DTYPES.items()}
    return {
        slot["name"]: torch.from_numpy(state.open_for_update(slot["name"]))
        .view(dtypes[slot["dtype"]])
        .view(slot["shape"])
        for slot in state.layout
    }
