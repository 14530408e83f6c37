"""Weights that come as an adapter of low rank: the sampler adds it to the checkpoint that it has, and serves the sum.

    W = round(W_checkpoint + alpha / rank * B @ A)          in float32, rounded once (LoRA, arXiv 2106.09685)

Generation is as fast as without an adapter. What is fetched, proved and undone is the adapter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from forebay.sampler.engine import HostCopy
from forebay.sampler.host_weights import HostWeights, SharedState
from forebay.sampler.torch_dtypes import TORCH_DTYPES
from forebay.wire.adapter import PREFIX
from forebay.wire.errors import OtherModel
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version
from forebay.wire.weights import CorruptWeights, HostState

A, B = ".lora_A.weight", ".lora_B.weight"


class MergedWeights(HostWeights):
    """HostWeights whose state is the adapter; the engine gets the model with it. All methods block."""

    def __init__(
        self, checkpoint: HostState, served: HostState, scaling: float, reread: Callable[[], HostState]
    ) -> None:
        """`checkpoint`: the model that the adapter belongs to, in the types of its files, kept; `served`: the same in
        those that the engine gets; `scaling`: alpha / rank; `reread` gives the checkpoint again."""
        super().__init__([])  # of which tensors the adapter is, its first version says
        self._checkpoint, self._scaling, self._reread = checkpoint, scaling, reread
        self._digest = checkpoint.digest()
        self._merged = SharedState(served.specs)
        self._merged.state.copy_from(served)

    def apply(self, manifest: weights_pb2.Manifest, payload: bytes) -> None:
        """One more update of the adapter. Raises OtherModel, WrongBase or CorruptWeights; nothing has changed then."""
        if manifest.model_digest != self._digest:
            raise OtherModel(
                f"the published adapter belongs to another model (digest {manifest.model_digest.hex()[:12]}) than the "
                f"checkpoint here ({self._digest.hex()[:12]}): copy the learner's [model] path to this machine"
            )
        super().apply(manifest, payload)

    def as_copy(self, version: Version) -> HostCopy:
        """The model with the adapter as it is now. Raises CorruptWeights when that is damaged or of another model."""
        self.state.require_sound()
        self._merge()
        return self._merged.as_copy(version)

    def recheck(self) -> list[str]:
        """Of the adapter as of other weights; a checkpoint that went bad is read again, for the next sum."""
        rotten = self._checkpoint.recheck()
        if rotten:
            self._checkpoint = self._reread()
            if self._checkpoint.digest() != self._digest:
                raise CorruptWeights("the checkpoint's files are others than at the start: start this sampler again")
        return rotten + super().recheck()

    def put_back(self) -> None:
        """The adapter and the model with it, as they were at the last `keep`."""
        changed = self.is_changed
        super().put_back()
        if changed:
            self._merge()

    def close(self) -> None:
        """Give the memory back."""
        super().close()
        self._merged.close()

    def _merge(self) -> None:
        """Blocks for about a copy of the model and its products B @ A."""
        for name, a, b in self._pairs():
            if name not in self._checkpoint.names:
                raise CorruptWeights(f"the adapter is for a tensor {name}, which the checkpoint does not have")
            base = as_tensor(self._checkpoint, name)
            if base.shape != (b.shape[0], a.shape[1]):
                raise CorruptWeights(f"the adapter of {name} is for another shape than {list(base.shape)}")
            room = as_tensor(self._merged.state, name, write=True)
            room.copy_(torch.addmm(base.float(), b.float(), a.float(), alpha=self._scaling))

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Of each tensor that has an adapter: its name in the checkpoint, A and B."""
        for name in self.state.names:
            if name.endswith(A):
                module = name.removesuffix(A)
                a, b = as_tensor(self.state, name), as_tensor(self.state, f"{module}{B}")
                yield f"{module.removeprefix(PREFIX)}.weight", a, b


def as_tensor(state: HostState, name: str, *, write: bool = False) -> torch.Tensor:
    """A tensor of a state: a copy, or to `write` on the state's own memory."""
    (slot,) = [slot for slot in state.layout if slot["name"] == name]
    bits = state.open_for_update(name) if write else state.view_of(name).copy()
    return torch.from_numpy(bits.view(np.uint8)).view(TORCH_DTYPES[slot["dtype"]]).view(slot["shape"])
