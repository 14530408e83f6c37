"""Adapters of low rank (LoRA, arXiv 2106.09685): the model stays as it is, and beside some of its layers two thin
matrices are trained. Layers and files are peft's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from forebay.config.learner_section import ALL_LINEAR, LoraSection
from forebay.config.models import RunFile
from forebay.errors import UsageError
from forebay.learner.pretrained import load_model
from forebay.wire.adapter import PREFIX
from forebay.wire.weights import HostState

ADAPTER = "default"


def load_actor(run: RunFile, saved: Path | None) -> PreTrainedModel:
    """The model that is trained: the newest checkpoint's, or the run file's; with `[learner.lora]` always the run
    file's, with an adapter that changes nothing yet (and whose numbers are the checkpoint's once its state is
    restored). Raises UsageError."""
    settings = run.learner.lora
    if settings is None:
        return load_model(str(saved) if saved else run.model.path)
    model = load_model(run.model.path)
    add_adapter(model, settings, run.run.seed)
    return model


def model_digest(run: RunFile) -> bytes:
    """What tells samplers which model the adapter belongs to: the digest of its files; empty without one."""
    return HostState.from_safetensors(run.model.path).digest() if run.learner.lora else b""


def add_adapter(model: PreTrainedModel, settings: LoraSection, seed: int) -> None:
    """Freeze `model` and put adapters beside its layers, in place: the same ones for the same seed, on every rank.

    Raises UsageError when the settings name what cannot have one.
    """
    from peft import LoraConfig, inject_adapter_in_model

    _check_targets(model, settings.targets)
    told: dict[str, Any] = {**settings.peft_settings(str(model.config.name_or_path)), "inference_mode": False}
    config = LoraConfig(**told)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)


def has_adapter(model: torch.nn.Module) -> bool:
    """Whether an adapter is trained, not the model."""
    return hasattr(model, "peft_config")


def adapter_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The adapter's parameters by the names that they have in peft's files."""
    return {
        f"{PREFIX}{name.replace(f'.{ADAPTER}.', '.')}": parameter
        for name, parameter in model.named_parameters()
        if f".{ADAPTER}." in name
    }


@contextmanager
def without_adapter(module: torch.nn.Module) -> Iterator[None]:
    """While it is open, the module answers as the model that training began with."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def write_config(model: PreTrainedModel, folder: Path) -> None:
    """adapter_config.json, peft's description of the adapter."""
    config: Any = model.peft_config[ADAPTER]
    config.save_pretrained(folder)
    path = folder / "adapter_config.json"
    told = json.loads(path.read_text())
    told |= {"inference_mode": True, "target_modules": sorted(told["target_modules"])}
    path.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")


def _check_targets(model: PreTrainedModel, targets: str | list[str]) -> None:
    """Only layers whose product with B @ A is a plain sum can be merged by a sampler: linear ones, and not the head,
    which is applied outside the model's forward pass."""
    fitting = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
    }
    if not fitting:
        raise UsageError(f"learner.lora: {model.config.name_or_path} ({model.config.model_type}) has no linear layers")
    names = [name for name, _ in model.named_modules()]
    for target in () if targets == ALL_LINEAR else targets:
        meant = {name for name in names if name == target or name.endswith(f".{target}")}
        if not meant or meant - fitting:
            trouble = "is no linear layer inside the model" if meant else "names no module of the model"
            known = ", ".join(sorted({name.rpartition(".")[2] for name in fitting}))
            raise UsageError(f'learner.lora.targets: "{target}" {trouble}; expected some of {known}')
