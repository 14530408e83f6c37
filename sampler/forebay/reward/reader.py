"""From prompt and reply to the tokens that a reward model reads, whatever engine runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from forebay.reward.scorer import Problem, Text
from forebay.wire.v1 import reward_pb2

#: A text with more characters than this for each token allowed is too long without being cut into tokens first.
_MAX_CHARACTERS_A_TOKEN = 64


class TextReader:
    """A reward model's own tokenizer, and how the model was taught to read a conversation."""

    def __init__(self, tokenizer: Any, *, max_tokens: int, chat: bool) -> None:
        self.max_tokens = max_tokens  #: of prompt and reply together
        self._tokenizer, self._chat = tokenizer, chat
        # Encoders that part their inputs by a token of its own were trained on (prompt, reply) as a pair.
        self._pairs = (
            not chat and tokenizer.sep_token is not None and tokenizer.num_special_tokens_to_add(pair=True) > 0
        )

    @property
    def gives_parts(self) -> bool:
        """Whether the model must be told which of a pair a token belongs to (`Text.parts`)."""
        return self._pairs and "token_type_ids" in self._tokenizer.model_input_names

    def encode(self, conversation: reward_pb2.Conversation) -> list[Text | Problem]:
        """See Scorer."""
        return [self._encode(conversation, completion) for completion in conversation.completions]

    def _encode(self, conversation: reward_pb2.Conversation, completion: str) -> Text | Problem:
        characters = len(conversation.system) + len(conversation.prompt) + len(completion)
        if characters > _MAX_CHARACTERS_A_TOKEN * self.max_tokens:
            return self._too_long(f"{characters} characters")
        encoded = self._tokens(conversation, completion)
        ids = np.asarray(encoded["input_ids"], np.int64)
        if len(ids) > self.max_tokens:
            return self._too_long(f"{len(ids)} tokens")
        if not len(ids):
            return Problem(kind=reward_pb2.ScoreError.FAILED, message="prompt and reply are empty")
        parts = encoded.get("token_type_ids")
        return Text(ids=ids, parts=None if parts is None else np.asarray(parts, np.int64))

    def _tokens(self, conversation: reward_pb2.Conversation, completion: str) -> Mapping[str, Any]:
        tokens: Mapping[str, Any]
        if self._chat:
            said = [("system", conversation.system)] if conversation.system else []
            said += [("user", conversation.prompt), ("assistant", completion)]
            messages = [{"role": role, "content": content} for role, content in said]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            tokens = self._tokenizer(text, add_special_tokens=False, verbose=False)
            return tokens
        asked = conversation.system + conversation.prompt
        texts = (asked, completion) if self._pairs else (asked + completion,)
        tokens = self._tokenizer(*texts, verbose=False)
        return tokens

    def _too_long(self, what: str) -> Problem:
        told = f"prompt and reply have {what}, the reward model takes {self.max_tokens} tokens"
        return Problem(kind=reward_pb2.ScoreError.TOO_LONG, message=told)
