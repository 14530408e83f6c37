"""Tiny models and random experience for the learner's tests."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forebay.config.models import RunFile
from forebay.learner.attention import ATTENTION, register
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.version import Version

VOCAB = 61
START = Version(1, 0)


def tiny_llama(seed: int = 0, *, tied: bool = True, hidden: int = 64) -> LlamaForCausalLM:
    """Two layers, four query heads on two key heads, float32, packed attention."""
    register()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(ATTENTION)
    return model


def random_groups(
    seed: int = 0, *, groups: int = 4, members: int = 3, longest: int = 12, top_p: float = 1.0, version: Version = START
) -> list[Trajectory]:
    """Ragged trajectories: prompts of 1..longest tokens, replies of 1..longest with some masked tokens."""
    rng = np.random.default_rng(seed)
    return [
        trajectory(rng, group, member, prompt, longest, top_p, version)
        for group in range(groups)
        for prompt in [rng.integers(0, VOCAB, rng.integers(1, longest + 1)).astype(np.int32)]
        for member in range(members)
    ]


def trajectory(
    rng: np.random.Generator, group: int, member: int, prompt: np.ndarray, longest: int, top_p: float, version: Version
) -> Trajectory:
    """One random member; its first token is always generated."""
    length = int(rng.integers(1, longest + 1))
    mask = rng.random(length) < 0.8
    mask[0] = True
    return Trajectory(
        group_id=group,
        member=member,
        prompt_tokens=prompt,
        tokens=rng.integers(0, VOCAB, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, rng.uniform(-5, -3, length), 0).astype(np.float32),
        spans=(VersionSpan(start=0, version=version),),
        temperature=0.75,
        top_p=top_p,
        reward=float(rng.normal()),
    )


def run_file(**learner: object) -> RunFile:
    """A run file that names an algorithm and no machine."""
    return RunFile.model_validate(
        {
            "run": {"name": "t"}, "model": {"path": "m"}, "task": {"name": "t"},
            "sampler": {"max_new_tokens": 17}, "learner": {"max_staleness": 0, **learner},
        }
    )  # fmt: skip
