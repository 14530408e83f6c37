"""A version as an ordinary checkpoint folder (format: huggingface/safetensors, README), written without torch."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.wire.host_state import HostState

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_BESIDE = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}  #: configuration and tokenizer, by suffix
_INDEX = ".index.json"  #: of weights in several files: not ours
_HEADER_ALIGNMENT = 8


def export(
    weights: HostState,
    into: Path,
    model: Path | None,
    tokenizer: Path | None,
    adapter: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write `weights`, and the configuration and tokenizer beside those of `model`; the files' names.

    With `adapter`, peft's description of one, the weights are an adapter's and the folder is peft's. `into` appears
    whole or not at all. Raises UsageError when it is there already.
    """
    refuse_existing(into)
    partial = into.with_name(f".{into.name}.making")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if adapter is not None:
        (partial / "adapter_config.json").write_text(json.dumps(adapter, indent=2, sort_keys=True) + "\n")
        write_safetensors(weights, partial / "adapter_model.safetensors")
    else:
        for source in dict.fromkeys([model, tokenizer]):
            _copy_beside(source, partial)
        _name_dtype(partial / "config.json", weights)
        write_safetensors(weights, partial / "model.safetensors")
    partial.rename(into)
    return sorted(path.name for path in into.iterdir())


def refuse_existing(into: Path) -> None:
    """Raises UsageError when `into` is there; to be asked before long work, too."""
    if into.exists():
        raise UsageError(f"{into}: exists already; give another folder with --into")


def write_safetensors(weights: HostState, file: Path) -> None:
    """All tensors in one file, in order of their names."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for slot in weights.layout:
        end = at + slot["nbytes"]
        header[slot["name"]] = {"dtype": slot["dtype"], "shape": slot["shape"], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in weights.names:
            stream.write(weights.view_of(name).data)


def _copy_beside(source: Path | None, into: Path) -> None:
    for path in sorted(source.iterdir()) if source is not None and source.is_dir() else []:
        if path.is_file() and path.suffix in _BESIDE and not path.name.endswith(_INDEX):
            shutil.copy(path, into / path.name)


def _name_dtype(config: Path, weights: HostState) -> None:
    """The configuration must name the type that the weights are published in, not that of the run's first model."""
    sizes = Counter[str]()
    for slot in weights.layout:
        sizes[slot["dtype"]] += slot["nbytes"]
    most = sizes.most_common(1)
    if config.is_file() and most and most[0][0] in _DTYPES:
        told = json.loads(config.read_text())
        told.pop("torch_dtype", None)
        config.write_text(json.dumps(told | {"dtype": _DTYPES[most[0][0]]}, indent=2, sort_keys=True) + "\n")
