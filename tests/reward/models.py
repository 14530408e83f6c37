"""Small classifiers with random weights, good and bad, as checkpoint folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from examples.tiny_model import character_tokenizer

POSITIONS = 64
CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}.{% endfor %}"


def llama(folder: Path, *, tokenizer: Any = None, **config: Any) -> Path:
    """A decoder that judges by its last token."""
    tokenizer = tokenizer or character_tokenizer()
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.5,  # wide enough that every letter changes the score
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "num_labels": 1,
    }
    torch.manual_seed(0)
    LlamaForSequenceClassification(LlamaConfig(**settings | config)).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def bert(folder: Path) -> Path:
    """An encoder that judges a pair: `[CLS] prompt [SEP] reply [SEP]`."""
    vocabulary = {token: index for index, token in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"0123456789+="])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.5,
        num_labels=1,
    )
    BertForSequenceClassification(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make(folder: Path, seed: int) -> None:
    """For `[reward.models.NAME] make`."""
    llama(folder)


def without_head(folder: Path, source: Path) -> Path:
    """The weights of a language model under the configuration of a classifier."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if "score" not in name}, folder / "model.safetensors")
    return folder


def pickled(folder: Path, source: Path) -> Path:
    """The same weights in a format that runs code when it is opened."""
    from safetensors.torch import load_file

    shutil.copytree(source, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder
