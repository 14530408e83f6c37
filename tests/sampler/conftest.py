"""What the sampler's tests share: tiny checkpoints of clearly different weights, one vLLM engine for the session."""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.tiny_model import character_tokenizer
from forebay.config.models import RunFile
from forebay.sampler.engine import Engine, HostCopy
from forebay.wire.version import Version

POSITIONS = 512


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function (seed) -> checkpoint folder of a random float32 Llama with a character tokenizer."""

    def make(seed: int) -> Path:
        folder = tmp_path_factory.mktemp(f"model-{seed}")
        tokenizer = character_tokenizer()
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            initializer_range=0.08,  # wide enough that two seeds disagree about every token
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
        LlamaForCausalLM(config).float().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    """The weights every run of these tests starts from: seed 0."""
    return make_checkpoint(0)


@pytest.fixture(scope="session")
def run_file(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """A run whose published weights, and so its engine's, are float32."""
    return RunFile.model_validate(
        {
            "run": {"name": "test", "folder": tmp_path_factory.mktemp("run"), "seed": 7},
            "model": {"path": str(checkpoint)},
            "task": {"name": "tests.sampler.letters:task", "chat": False, "train_prompts": 20, "heldout_prompts": 8},
            "publish": {"dtype": "float32"},
            "learner": {"group_size": 4, "groups_per_step": 2},
            "sampler": {
                "id": "s0",
                "max_new_tokens": 12,
                "concurrent_groups": 4,
                "engine": {"kv_cache_memory_bytes": 64 << 20, "max_model_len": POSITIONS, "block_size": 32},
            },
        }
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(run_file: RunFile, checkpoint: Path) -> AsyncIterator[Engine]:
    """The session's one vLLM. It starts with the weights of `checkpoint` as version 1.0."""
    started = await Engine.start(run_file, checkpoint, run_file.run.home / "engine.log")
    yield started
    started.stop()


def host_copy(folder: Path, version: Version, *, drop: str | None = None) -> HostCopy:
    """The float32 checkpoint in `folder` as a memfd, as a receiver would hold it; `drop` leaves one tensor out."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = {
        name: tensor for name, tensor in sorted(model.state_dict().items()) if name not in (drop, "lm_head.weight")
    }
    layout: list[dict[str, Any]] = []
    offset = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * 4
        layout.append({"name": name, "dtype": "F32", "shape": list(tensor.shape), "offset": offset, "nbytes": nbytes})
        offset += -(-nbytes // 64) * 64
    copy_fd = os.memfd_create("weights")
    os.ftruncate(copy_fd, offset)
    with mmap.mmap(copy_fd, offset) as memory:
        for slot in layout:
            memory[slot["offset"] : slot["offset"] + slot["nbytes"]] = tensors[slot["name"]].numpy().tobytes()
    return HostCopy(
        path=f"/proc/{os.getpid()}/fd/{copy_fd}", nbytes=offset, layout=layout, version=version, digest=b"\0" * 32
    )
