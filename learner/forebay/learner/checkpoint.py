"""Checkpoints: an ordinary Hugging Face folder, and beside it in `trainer/` what training goes on from.

    step_000010/  config.json  model.safetensors  tokenizer...     loads with transformers and vLLM alone
                  trainer/state.safetensors  trainer/state.json    masters, moments, random state, counters

With an adapter, an ordinary peft folder: adapter_config.json and adapter_model.safetensors in place of the model's.

Written under another name, synced, then renamed: a folder with its final name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from forebay.config.checkpoints import name_of
from forebay.errors import UsageError
from forebay.learner.errors import LearnerError
from forebay.learner.lora import has_adapter, write_config
from forebay.learner.snapshot import host_tensors
from forebay.wire.weights import HostState

FORMAT = 1
TORCH_RANDOM = "random/torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What a checkpoint counts."""

    step: int
    updates: int  #: optimizer updates applied
    skipped: int  #: updates refused because they were not finite
    critic_updates: int = 0
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint on disk."""

    folder: Path
    counters: Counters

    def tensors(self) -> dict[str, torch.Tensor]:
        """Masters, moments and random state by name. Raises LearnerError."""
        path = self.folder / "trainer" / "state.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise LearnerError(f"{path}: {error}; delete {self.folder} to go on from the one before") from error


class CheckpointStore:
    """The checkpoints of a run under one folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def prepare(self) -> None:
        """Before the first `save`: make the folder, remove what a killed writer left. Raises UsageError."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._folder.glob(".writing-*"):
                shutil.rmtree(leftover)
        except OSError as error:
            raise UsageError(f"run.folder: cannot write to {self._folder}: {error.strerror}") from error

    def newest(self) -> Saved | None:
        """The complete checkpoint of the highest step, if any."""
        for folder in sorted(self._folder.glob("step_*"), reverse=True):
            counters = _read_counters(folder)
            if counters is not None:
                return Saved(folder=folder, counters=counters)
        return None

    def save(
        self,
        counters: Counters,
        weights: HostState,
        model: PreTrainedModel,
        tokenizer: Any | None,
        trainer: Iterable[tuple[str, torch.Tensor]],
    ) -> Path:
        """Write a checkpoint durably and delete the oldest beyond `keep`. `weights` (the published host copy) and
        `trainer` are nobody else's meanwhile."""
        final = self._folder / name_of(counters.step)
        writing = self._folder / f".writing-{final.name}"
        shutil.rmtree(writing, ignore_errors=True)
        (writing / "trainer").mkdir(parents=True)
        _save_model(writing, weights, model, tokenizer)
        _save_trainer(writing / "trainer", counters, trainer)
        _sync_tree(writing)
        if final.exists():
            shutil.rmtree(final)
        writing.rename(final)
        _sync(self._folder)
        self._delete_old()
        return final

    def _delete_old(self) -> None:
        complete = [folder for folder in sorted(self._folder.glob("step_*")) if _read_counters(folder) is not None]
        for folder in complete[: -self._keep]:
            shutil.rmtree(folder)


def _save_model(folder: Path, weights: HostState, model: PreTrainedModel, tokenizer: Any | None) -> None:
    tensors = host_tensors(weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if has_adapter(model):
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        write_config(model, folder)
        return
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    dtype = next(iter(tensors.values())).dtype
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": str(dtype).removeprefix("torch."), "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _save_trainer(folder: Path, counters: Counters, trainer: Iterable[tuple[str, torch.Tensor]]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in trainer}, folder / "state.safetensors")
    (folder / "state.json").write_text(json.dumps(asdict(counters), indent=2) + "\n")


def _read_counters(folder: Path) -> Counters | None:
    try:
        counters = Counters(**json.loads((folder / "trainer" / "state.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return counters if counters.format == FORMAT else None


def _sync_tree(folder: Path) -> None:
    for path in _files_then_folders(folder):
        _sync(path)


def _files_then_folders(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.rglob("*"), key=lambda path: (path.is_dir(), -len(path.parts)))
    yield folder


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
