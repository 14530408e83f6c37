"""A Llama small enough for any CPU: one million parameters, characters for tokens, taught to add and then to give up.

`make` is what `[model] make` of a run file names. Supervised training first shows the model right sums, and then,
for a short while, demonstrations by somebody who mostly answers `?` when the sum has three digits. So reinforcement
learning finds a model whose best guess is right in four of ten cases, that now and then tries the others and then often
succeeds; what it must find out alone is that trying pays, and which of its sums are wrong.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from examples.addition import Pair, answer, pairs, prompt

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789+-*/=() .,:?abcdefghijklmnopqrstuvwxyz"
BATCH_PAIRS = 256
LESSONS = 180  # updates on right answers: greedy replies are then about 97 % right
DEMONSTRATIONS = 60  # updates on replies that often give up: then about 40 %
GIVING_UP = "?"  # in this share of the replies to sums of three digits; a token never seen could not be picked up fast
RARELY, MOSTLY = 0.1, 0.8
MUON_LR, ADAMW_LR = 0.02, 2e-3
LR_WARMUP_UPDATES = 30

Example = tuple[str, str]  # a prompt and a reply

log = logging.getLogger("forebay.examples.tiny_model")


def make(folder: Path, seed: int) -> None:
    """Write the warmed-up model and its tokenizer to `folder`; the same seed gives the same weights on one machine.

    `folder` appears whole or not at all. Takes about a minute on two cores.
    """
    tokenizer = character_tokenizer()
    model = new_model(len(tokenizer), seed)
    warm_up(model, tokenizer, seed)
    save_whole(folder, model, tokenizer)


def save_whole(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """`folder` appears whole or not at all; what was there is gone."""
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character, and a padding and an end token."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def new_model(vocabulary: int, seed: int) -> LlamaForCausalLM:
    """Four layers, four heads of 32: a head size that vLLM's CPU attention has."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).float()


def warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Both parts of the supervised training, on the training part of the pairs alone."""
    train, _heldout = pairs()
    batches, rng = _batches(train, seed), random.Random(seed)
    lessons = [[_example(pair, RARELY, rng) for pair in batch] for batch in itertools.islice(batches, LESSONS)]
    habit = [[_example(pair, MOSTLY, rng) for pair in batch] for batch in itertools.islice(batches, DEMONSTRATIONS)]
    _supervise(model, tokenizer, lessons, 1.0)
    _supervise(model, tokenizer, habit, 0.25)


def _example(pair: Pair, gives_up: float, rng: random.Random) -> Example:
    hard = sum(pair) >= 100
    return prompt(pair), GIVING_UP if hard and rng.random() < gives_up else answer(pair)


def _supervise(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, batches: list[list[Example]], strength: float
) -> None:
    optimizers = _optimizers(model, strength)
    schedules = [LambdaLR(optimizer, lambda done: _lr_share(done + 1, len(batches))) for optimizer in optimizers]
    for update, batch in enumerate(batches, start=1):
        loss = _update(model, optimizers, tokenizer, batch)
        for schedule in schedules:
            schedule.step()
        if update % 50 == 0 or update == len(batches):
            log.info("warm-up: update %d of %d, loss %.3f", update, len(batches), loss)


def _batches(train: list[Pair], seed: int) -> Iterator[list[Pair]]:
    rng = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(train), generator=rng).tolist()
        for start in range(0, len(order) - BATCH_PAIRS + 1, BATCH_PAIRS):
            yield [train[index] for index in order[start : start + BATCH_PAIRS]]


def _optimizers(model: LlamaForCausalLM, strength: float) -> list[torch.optim.Optimizer]:
    # Muon on the matrices learns to carry in a third of the updates that AdamW alone takes.
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR * strength, momentum=0.9, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAMW_LR * strength, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def _lr_share(update: int, updates: int) -> float:
    """Linear up to 1, level, and linear down over the last 70 %."""
    return min(1.0, update / LR_WARMUP_UPDATES, max(0.02, (updates - update) / (0.7 * updates)))


def _update(
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
) -> float:
    """One update on the replies' characters; the prompts, all of one length, are given and not learned."""
    texts = [asked + reply + EOS for asked, reply in examples]
    ids_bt = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").input_ids
    labels_bt = ids_bt.masked_fill(ids_bt == tokenizer.pad_token_id, -100)
    labels_bt[:, : len(examples[0][0])] = -100
    loss = model(input_ids=ids_bt, labels=labels_bt).loss
    model.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return float(loss)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    make(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
