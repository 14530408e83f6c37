"""A Hugging Face sequence classifier with one label as a reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from forebay.config.reward_section import RewardModelSection
from forebay.errors import UsageError
from forebay.reward.scorer import Problem, Text
from forebay.wire.v1 import reward_pb2

#: A text with more characters than this for each token allowed is too long without being cut into tokens first.
_MAX_CHARACTERS_A_TOKEN = 64
#: Where neither configuration nor tokenizer says how much the model takes.
_DEFAULT_MAX_TOKENS = 4096


class SequenceClassifier:
    """Scores are the one logit, as the model was trained to give it. B texts of at most T tokens at a time."""

    def __init__(
        self, model: Any, tokenizer: Any, *, max_tokens: int, pad_id: int, chat: bool, device: torch.device
    ) -> None:
        self._model, self._tokenizer, self._device = model, tokenizer, device
        self._max_tokens, self._pad_id, self._chat = max_tokens, pad_id, chat
        # Encoders that part their inputs by a token of its own were trained on (prompt, reply) as a pair.
        self._pairs = (
            not chat and tokenizer.sep_token is not None and tokenizer.num_special_tokens_to_add(pair=True) > 0
        )

    @classmethod
    def load(cls, name: str, section: RewardModelSection, source: str) -> SequenceClassifier:
        """From a checkpoint folder or hub name; nothing in it is executed or unpickled.

        Raises UsageError, in one line, for what cannot be a reward model: several labels, no weights for the score,
        no padding token, no tokenizer.
        """
        return _Loading(name, section, source).load()

    def encode(self, conversation: reward_pb2.Conversation) -> list[Text | Problem]:
        """See Scorer."""
        return [self._encode(conversation, completion) for completion in conversation.completions]

    def score(self, batch: Sequence[Text]) -> list[float]:
        """See Scorer."""
        lengths, longest = [len(text) for text in batch], max(map(len, batch))
        mask_bt = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
        inputs = {"input_ids": _padded([text.ids for text in batch], longest, self._pad_id), "attention_mask": mask_bt}
        if batch[0].parts is not None:
            inputs["token_type_ids"] = _padded([text.parts for text in batch if text.parts is not None], longest, 0)
        with torch.inference_mode():
            logits_b1 = self._model(**{key: tensor.to(self._device) for key, tensor in inputs.items()}).logits
        scores: list[float] = logits_b1[:, 0].float().cpu().tolist()
        return scores

    def _encode(self, conversation: reward_pb2.Conversation, completion: str) -> Text | Problem:
        characters = len(conversation.system) + len(conversation.prompt) + len(completion)
        if characters > _MAX_CHARACTERS_A_TOKEN * self._max_tokens:
            return self._too_long(f"{characters} characters")
        encoded = self._tokens(conversation, completion)
        ids = np.asarray(encoded["input_ids"], np.int64)
        if len(ids) > self._max_tokens:
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
        told = f"prompt and reply have {what}, the reward model takes {self._max_tokens} tokens"
        return Problem(kind=reward_pb2.ScoreError.TOO_LONG, message=told)


class _Loading:
    """One reward model on its way into memory, and the words for what is wrong with it."""

    def __init__(self, name: str, section: RewardModelSection, source: str) -> None:
        self._name, self._section, self._source = name, section, source

    def load(self) -> SequenceClassifier:
        disable_progress_bar()
        config = self._one_label(self._read("config", AutoConfig.from_pretrained))
        tokenizer = self._read("tokenizer", AutoTokenizer.from_pretrained)
        pad_id = self._pad_id(config, tokenizer)
        chat, max_tokens = self._chat(tokenizer), self._max_tokens(config, tokenizer)
        device = self._device()
        model, report = self._read(
            "weights",
            AutoModelForSequenceClassification.from_pretrained,
            config=config,
            dtype=self._section.dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
        if report["missing_keys"]:
            lacking = ", ".join(sorted(report["missing_keys"])[:3])
            raise self._wrong(f"its weights lack {lacking}: it was not trained to score; expected a reward model")
        model.eval().to(device)
        return SequenceClassifier(model, tokenizer, max_tokens=max_tokens, pad_id=pad_id, chat=chat, device=device)

    def _read(self, what: str, reader: Any, **more: Any) -> Any:
        try:
            return reader(self._source, **more)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise self._wrong(f"no {what} to be read ({reason})") from error

    def _one_label(self, config: Any) -> Any:
        if config.num_labels != 1:
            raise self._wrong(f"it has {config.num_labels} labels; expected a model with one (num_labels = 1)")
        return config

    def _pad_id(self, config: Any, tokenizer: Any) -> int:
        known = [config.get_text_config().pad_token_id, tokenizer.pad_token_id]
        pad_id = next((one for one in known if one is not None), None)
        if pad_id is None:
            raise self._wrong("neither its configuration nor its tokenizer has a pad token; expected pad_token_id")
        config.get_text_config().pad_token_id = pad_id  # the model finds a text's last token by it
        return int(pad_id)

    def _chat(self, tokenizer: Any) -> bool:
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if self._section.chat and not has_template:
            raise self._wrong("chat is true, but its tokenizer has no chat template: set chat = false")
        return has_template if self._section.chat is None else self._section.chat

    def _max_tokens(self, config: Any, tokenizer: Any) -> int:
        said = [getattr(config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length]
        takes = min((int(limit) for limit in said if limit and limit < 1 << 30), default=_DEFAULT_MAX_TOKENS)
        wanted = self._section.max_tokens or takes
        if wanted > takes:
            raise self._wrong(f"max_tokens is {wanted}; expected at most {takes}, which the model takes")
        return wanted

    def _device(self) -> torch.device:
        try:
            device = torch.device(self._section.device or ("cuda" if torch.cuda.is_available() else "cpu"))
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise self._wrong(f"device is {self._section.device!r}: {reason}") from error
        return device

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"reward model {self._name} at {self._source}: {what}")


def _padded(rows: Sequence[NDArray[np.int64]], longest: int, fill: int) -> torch.Tensor:
    """Rows to [B, T], filled up on the right."""
    padded_bt = np.full((len(rows), longest), fill, np.int64)
    for index, row in enumerate(rows):
        padded_bt[index, : len(row)] = row
    return torch.from_numpy(padded_bt)
