"""A sampler's copy of a model whose adapter alone is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from forebay.sampler.engine import HostCopy
from forebay.sampler.merged_weights import MergedWeights, as_tensor
from forebay.wire.errors import OtherModel
from forebay.wire.version import Version
from forebay.wire.weights import CorruptWeights, Encoded, HostState, TensorSpec, encode_anchor, encode_delta

RANK, ALPHA = 4, 12.0


@pytest.fixture
def model(checkpoint: Path) -> Any:
    """peft's own, with an adapter that matters."""
    torch.manual_seed(1)
    config = LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    found = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), config)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    return found


def adapter_of(model: Any) -> HostState:
    """As a learner publishes it."""
    tensors = {n.replace(".default.", "."): p.detach() for n, p in model.named_parameters() if ".default." in n}
    state = HostState.allocate(
        [TensorSpec(name=name, dtype="F32", shape=tuple(tensor.shape)) for name, tensor in tensors.items()]
    )
    for name, tensor in tensors.items():
        state.open_for_update(name)[:] = tensor.numpy().view(np.uint32).ravel()
    return state


def merged_weights(checkpoint: HostState, served: HostState, scaling: float) -> MergedWeights:
    return MergedWeights(checkpoint, served, scaling, lambda: checkpoint)


def take(weights: MergedWeights, encoded: Encoded) -> HostState:
    """Apply, and read what the engine would."""
    encoded.manifest.model_digest = weights._checkpoint.digest()
    weights.apply(encoded.manifest, encoded.payload())
    return served(weights)


def served(weights: MergedWeights) -> HostState:
    return read(weights.as_copy(Version(1, 1)))


def read(copy: HostCopy) -> HostState:
    state = HostState.allocate(
        [TensorSpec(name=s["name"], dtype=s["dtype"], shape=tuple(s["shape"])) for s in copy.layout]
    )
    memory = np.fromfile(copy.path, np.uint8)
    for slot in state.layout:
        bits = memory[slot["offset"] : slot["offset"] + slot["nbytes"]]
        state.open_for_update(slot["name"])[:] = bits.view(np.uint32)
    return state


def test_the_engine_gets_what_peft_would_merge(checkpoint: Path, model: Any) -> None:
    base, adapter = HostState.from_safetensors(checkpoint, "F32"), adapter_of(model)
    weights = merged_weights(base, base, ALPHA / RANK)
    assert served(weights).digest() == base.digest(), "without an adapter it is the checkpoint"
    anchor = encode_anchor(adapter, version=Version(1, 0))
    found = take(weights, anchor)
    assert weights.state.digest() == adapter.digest() == anchor.manifest.digest, "what is proved is the adapter"
    merged, touched = model.merge_and_unload().state_dict(), 0
    for name in found.names:
        assert torch.allclose(as_tensor(found, name), merged[name], atol=1e-6), name
        touched += not np.array_equal(found.view_of(name), base.view_of(name))
    assert touched == 8, "two layers in each of four blocks"

    later = HostState.allocate(adapter.specs)
    later.copy_from(adapter)
    later.open_for_update(adapter.names[-1])[:] += 1
    delta = encode_delta(adapter, later, version=Version(1, 1), base_version=Version(1, 0))
    weights.keep()
    assert take(weights, delta).digest() != found.digest()
    changed = weights.as_copy(Version(1, 1))
    weights.put_back()
    assert read(changed).digest() == found.digest(), "what the engine's workers map is put back, too"
    assert weights.state.digest() == adapter.digest()
    assert served(weights).digest() == found.digest(), "an update that failed leaves nothing behind"
    weights.close()


def test_the_sum_is_rounded_once(checkpoint: Path, model: Any) -> None:
    base, adapter = HostState.from_safetensors(checkpoint), adapter_of(model)
    weights = merged_weights(base, HostState.from_safetensors(checkpoint, "BF16"), ALPHA / RANK)
    anchor = encode_anchor(adapter, version=Version(1, 0))
    anchor.manifest.model_digest = base.digest()
    weights.apply(anchor.manifest, anchor.payload())
    weights.as_copy(Version(1, 0))
    merged = model.merge_and_unload().state_dict()
    for name in base.names:
        if "q_proj" in name:
            found = as_tensor(weights._merged.state, name)
            assert float((found != merged[name].bfloat16()).float().mean()) < 0.01, name
    weights.close()


def test_an_adapter_of_another_model_is_refused(checkpoint: Path, model: Any) -> None:
    base, other = HostState.from_safetensors(checkpoint, "F32"), HostState.from_safetensors(checkpoint, "F32")
    other.bits_of(other.names[0])[0] ^= 1
    weights, anchor = merged_weights(base, base, 1.0), encode_anchor(adapter_of(model), version=Version(1, 0))
    for digest in (other.digest(), b""):
        anchor.manifest.model_digest = digest
        with pytest.raises(OtherModel, match=rf"another model .*\({base.digest().hex()[:12]}\): copy"):
            weights.apply(anchor.manifest, anchor.payload())
    assert served(weights).digest() == base.digest()
    assert not weights.is_changed
    weights.close()


def test_a_checkpoint_that_went_bad_in_memory_is_read_again(checkpoint: Path, model: Any) -> None:
    def fresh() -> HostState:
        return HostState.from_safetensors(checkpoint, "F32")

    bad, files = fresh(), [fresh()]
    weights = MergedWeights(bad, fresh(), ALPHA / RANK, lambda: files[0])
    first = take(weights, encode_anchor(adapter_of(model), version=Version(1, 0)))
    weights.keep()
    assert weights.recheck() == []
    name = next(name for name in bad.names if "q_proj" in name)
    bad._bytes(name)[0] ^= 1
    assert served(weights).digest() != first.digest()
    assert weights.recheck() == [name]
    assert served(weights).digest() == first.digest()
    weights._checkpoint._bytes(name)[0] ^= 1
    files[0] = HostState.from_safetensors(checkpoint, "BF16")
    with pytest.raises(CorruptWeights, match="others than at the start"):
        weights.recheck()
    weights.close()


def test_an_adapter_for_other_tensors_is_refused(checkpoint: Path, model: Any) -> None:
    adapter = adapter_of(model)
    renamed = HostState.allocate(
        [TensorSpec(name=s.name.replace("layers.3", "layers.9"), dtype="F32", shape=s.shape) for s in adapter.specs]
    )
    base = HostState.from_safetensors(checkpoint, "F32")
    weights = merged_weights(base, base, 1.0)
    with pytest.raises(CorruptWeights, match=r"layers\.9.*the checkpoint does not have"):
        take(weights, encode_anchor(renamed, version=Version(1, 0)))
    weights.close()
