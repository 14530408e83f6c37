"""Between a task's texts and the model's token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.config.models import TaskSection
from forebay.errors import UsageError


class Prompter:
    """Makes prompts of questions, and texts of replies."""

    def __init__(self, tokenizer: Any, section: TaskSection) -> None:
        """`tokenizer` is a transformers tokenizer. Raises UsageError when it cannot do what `section` asks."""
        if section.chat and not getattr(tokenizer, "chat_template", None):
            raise UsageError("task.chat is true, but the model's tokenizer has no chat template: set task.chat = false")
        if "{prompt}" not in section.prompt_template:
            raise UsageError(f"task.prompt_template is {section.prompt_template!r}: expected {{prompt}} in it")
        self._tokenizer, self._section = tokenizer, section

    @classmethod
    def load(cls, folder: str, section: TaskSection) -> Prompter:
        """With the tokenizer of a checkpoint. Raises UsageError when there is none."""
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(folder), section)
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"no tokenizer at {folder} ({_first_line(error)}): set model.tokenizer") from error

    def text_of(self, question: str) -> str:
        """The whole prompt as text."""
        message = self._section.prompt_template.replace("{prompt}", question)
        if not self._section.chat:
            return self._section.system_prompt + message
        messages = [{"role": "user", "content": message}]
        if self._section.system_prompt:
            messages.insert(0, {"role": "system", "content": self._section.system_prompt})
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def tokens_of(self, question: str) -> NDArray[np.int32]:
        """The whole prompt as token ids [P]. A chat template brings special tokens, raw text gets the tokenizer's."""
        ids = self._tokenizer(self.text_of(question), add_special_tokens=not self._section.chat)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def reply_of(self, tokens: Sequence[int] | NDArray[np.int32]) -> str:
        """What the policy said, without special tokens."""
        text: str = self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True)
        return text

    def encode_all(self, questions: Iterable[str], *, max_model_tokens: int) -> list[NDArray[np.int32]]:
        """Every prompt's tokens. Raises UsageError when one leaves no room for a reply."""
        prompts = [self.tokens_of(question) for question in questions]
        longest = max(map(len, prompts), default=0)
        if longest >= max_model_tokens:
            raise UsageError(
                f"a prompt of the task has {longest} tokens, but prompt and reply together have {max_model_tokens}: "
                "raise sampler.engine.max_model_len, or use a model with a longer context"
            )
        return prompts


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
