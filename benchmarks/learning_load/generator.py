"""A stand-in for the sampler: replies by transformers, in step with the learner, so that their age is exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from examples.addition import Addition
from forebay.sampler.tasks.task import Question
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.version import Version

Tokens = NDArray[np.int64]


class LockstepGenerator:
    """Generates with the weights it was given last. Prompts of a batch have one length, as the task's all do."""

    def __init__(self, folder: str, task: Addition, max_new_tokens: int, seed: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._task, self._max_new_tokens = task, max_new_tokens
        self._random = torch.Generator().manual_seed(seed)

    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Generate with these from now on."""
        self._model.load_state_dict(weights, strict=False)  # a tied head stands in them once

    def groups(self, questions: Sequence[Question], size: int, *, first_id: int, version: Version) -> list[Trajectory]:
        """`size` scored replies to each question, at temperature 1."""
        ids_bp = self._prompts([question for question in questions for _ in range(size)])
        tokens_bt, logprobs_bt = self._replies(ids_bp, greedy=False)
        replies = zip(tokens_bt.numpy(), logprobs_bt.numpy(), strict=True)
        return [
            self._trajectory(questions[row // size], (first_id + row // size, row % size), ids_bp[row], reply, version)
            for row, reply in enumerate(replies)
        ]

    def score(self, questions: Sequence[Question]) -> float:
        """Share of the questions that the likeliest reply answers."""
        tokens_bt, _ = self._replies(self._prompts(questions), greedy=True)
        replies = zip(questions, tokens_bt.numpy(), strict=True)
        return float(np.mean([self._reward(question, self._cut(tokens)) for question, tokens in replies]))

    def _prompts(self, questions: Sequence[Question]) -> torch.Tensor:
        texts = [question.text for question in questions]
        return torch.tensor(self._tokenizer(texts, add_special_tokens=True)["input_ids"])

    @torch.no_grad()
    def _replies(self, ids_bp: torch.Tensor, *, greedy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [b, t] and their log-probabilities [b, t]; what comes after an end token counts for nothing."""
        tokens, logprobs = list[torch.Tensor](), list[torch.Tensor]()
        new_bn, cache = ids_bp, DynamicCache()
        for _ in range(self._max_new_tokens):
            logprob_bv = self._model(new_bn, past_key_values=cache, use_cache=True).logits[:, -1].log_softmax(-1)
            if greedy:
                token_b1 = logprob_bv.argmax(-1, keepdim=True)
            else:
                token_b1 = torch.multinomial(logprob_bv.exp(), 1, generator=self._random)
            new_bn = token_b1
            tokens.append(token_b1)
            logprobs.append(logprob_bv.gather(1, token_b1))
        return torch.cat(tokens, 1), torch.cat(logprobs, 1)

    def _trajectory(
        self,
        question: Question,
        place: tuple[int, int],
        prompt_p: torch.Tensor,
        reply: tuple[Tokens, NDArray[np.float32]],
        version: Version,
    ) -> Trajectory:
        tokens_t = self._cut(reply[0])
        return Trajectory(
            group_id=place[0],
            member=place[1],
            prompt_tokens=prompt_p.numpy().astype(np.int32),
            tokens=tokens_t.astype(np.int32),
            loss_mask=np.ones(len(tokens_t), np.bool_),
            logprobs=reply[1][: len(tokens_t)],
            spans=(VersionSpan(start=0, version=version),),
            temperature=1.0,
            top_p=1.0,
            reward=self._reward(question, tokens_t),
        )

    def _cut(self, tokens_t: Tokens) -> Tokens:
        """Up to the end token, that included."""
        ends = np.flatnonzero(tokens_t == self._tokenizer.eos_token_id)
        return tokens_t[: ends[0] + 1] if len(ends) else tokens_t

    def _reward(self, question: Question, reply_t: Tokens) -> float:
        text = self._tokenizer.decode(reply_t.tolist(), skip_special_tokens=True)
        return float(self._task.score(question, text).reward)
