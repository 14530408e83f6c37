"""A reward model small enough for any CPU: it reads `37+58=95` and says about 1 when the sum is right, else about 0.

`make` is what `[reward.models.NAME] make` of a run file names. The classifier has the size of `examples.tiny_model` and
is made from nothing: supervised, on right sums and on mistakes made up for the purpose. Beside the score it learns to
continue right sums, as reward models are often made of language models; that head is not kept. It is no calculator: of
sums that miss by one digit it takes some for right, and the held-out score of a run, which it has no part in, shows how
much that matters.
"""

from __future__ import annotations

import itertools
import logging
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from examples.addition import Pair, answer, pairs, prompt
from examples.tiny_model import EOS, GIVING_UP, character_tokenizer, save_whole

UPDATES, BATCH_PAIRS = 180, 160
WARMUP_UPDATES = 30
MUON_LR, ADAMW_LR = 0.025, 2.5e-3
SCORE_SHARE = 4.0  # of the loss, to 1 of the continuation
DIGITS = "0123456789"

log = logging.getLogger("forebay.examples.tiny_reward_model")


def make(folder: Path, seed: int) -> None:
    """Write the reward model and its tokenizer to `folder`; the same seed gives the same weights on one machine.

    `folder` appears whole or not at all. Takes about a minute on one core.
    """
    tokenizer = character_tokenizer()
    model = new_model(len(tokenizer), seed)
    train(model, tokenizer, seed)
    save_whole(folder, model, tokenizer)


def new_model(vocabulary: int, seed: int) -> LlamaForSequenceClassification:
    """One label: the score."""
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
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        num_labels=1,
    )
    return LlamaForSequenceClassification(config).float()


def train(model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """On the training part of the pairs alone: the held-out ones are nobody's to learn from."""
    continuing = torch.nn.Linear(model.config.hidden_size, len(tokenizer), bias=False)
    optimizers = _optimizers(model, continuing)
    schedules = [LambdaLR(optimizer, _lr_share) for optimizer in optimizers]
    for update, lesson in enumerate(itertools.islice(_lessons(tokenizer, seed), UPDATES), start=1):
        score_loss, continuing_loss = _losses(model, continuing, lesson)
        model.zero_grad()
        continuing.zero_grad()
        (SCORE_SHARE * score_loss + continuing_loss).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *continuing.parameters()], 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if update % 60 == 0:
            log.info("update %d of %d: the score is off by %.2f", update, UPDATES, score_loss.item() ** 0.5)


def mistake(right: str, rng: random.Random) -> str:
    """A wrong reply: a digit changed, off by a round number, cut or run on, given up, or anything."""
    kind = rng.random()
    at = rng.randrange(len(right))
    if kind < 0.55:
        return right[:at] + rng.choice(DIGITS.replace(right[at], "")) + right[at + 1 :]
    if kind < 0.75:
        return str(max(0, int(right) + rng.choice([-100, -10, -1, 1, 10, 100])))
    if kind < 0.85:
        return right + rng.choice(DIGITS + GIVING_UP) if rng.random() < 0.5 else right[:-1]
    if kind < 0.93:
        return GIVING_UP
    return "".join(rng.choices(DIGITS + GIVING_UP, k=rng.randint(1, 5)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lesson:
    """Texts of B pairs, T characters. After each one of a reply: is what stands there exactly the answer?"""

    ids_bt: torch.Tensor
    scores_bt: torch.Tensor  # 1 where it is, else 0
    weights_bt: torch.Tensor  # 0 outside replies
    next_bt: torch.Tensor  # the character that follows in a right reply, else -100


def _lessons(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[_Lesson]:
    """For ever; every other reply is right."""
    rng, (known, _heldout) = random.Random(seed), pairs()
    while True:
        chosen = rng.sample(known, BATCH_PAIRS)
        replies = [answer(pair) if index % 2 else mistake(answer(pair), rng) for index, pair in enumerate(chosen)]
        yield _lesson(tokenizer, chosen, replies)


def _lesson(tokenizer: PreTrainedTokenizerFast, chosen: list[Pair], replies: list[str]) -> _Lesson:
    texts = [prompt(pair) + reply + EOS for pair, reply in zip(chosen, replies, strict=True)]
    ids_bt = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").input_ids
    scores_bt, weights_bt = torch.zeros(ids_bt.shape), torch.zeros(ids_bt.shape)
    next_bt = torch.full(ids_bt.shape, -100)
    asked = len(prompt(chosen[0]))  # the same for all pairs
    for row, (pair, reply) in enumerate(zip(chosen, replies, strict=True)):
        right, said = answer(pair), slice(asked - 1, asked + len(reply))
        scores_bt[row, said] = torch.tensor([float(reply[:count] == right) for count in range(len(reply) + 1)])
        weights_bt[row, said] = 1.0
        if reply == right:
            next_bt[row, said] = ids_bt[row, asked : asked + len(reply) + 1]
    return _Lesson(ids_bt=ids_bt, scores_bt=scores_bt, weights_bt=weights_bt * (1 + scores_bt), next_bt=next_bt)


def _losses(
    model: LlamaForSequenceClassification, continuing: torch.nn.Linear, lesson: _Lesson
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squared error of the score, and cross-entropy of the next character."""
    mask_bt = (lesson.ids_bt != model.config.pad_token_id).long()
    hidden_bth = model.model(input_ids=lesson.ids_bt, attention_mask=mask_bt).last_hidden_state
    errors_bt = (model.score(hidden_bth)[..., 0] - lesson.scores_bt) ** 2
    score_loss = (errors_bt * lesson.weights_bt).sum() / lesson.weights_bt.sum()
    logits = continuing(hidden_bth).flatten(0, 1)
    return score_loss, torch.nn.functional.cross_entropy(logits, lesson.next_bt.flatten(), ignore_index=-100)


def _optimizers(
    model: LlamaForSequenceClassification, continuing: torch.nn.Linear
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    named = dict(model.model.named_parameters())
    matrices = [weight for name, weight in named.items() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in named.items() if weight.ndim != 2 or "embed" in name]
    others += [*model.score.parameters(), *continuing.parameters()]
    return (
        torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.9, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.01),
    )


def _lr_share(done: int) -> float:
    """Linear up to 1, level, and linear down over the last 70 %."""
    return min(1.0, (done + 1) / WARMUP_UPDATES, max(0.02, (UPDATES - done - 1) / (0.7 * UPDATES)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    make(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
