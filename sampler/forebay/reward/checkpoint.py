"""A checkpoint that should be a reward model: what is read of it before its weights, and words for what is wrong."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoTokenizer

from forebay.config.reward_section import RewardModelSection
from forebay.errors import UsageError
from forebay.reward.reader import TextReader

#: Where neither configuration nor tokenizer says how much the model takes.
_DEFAULT_MAX_TOKENS = 4096


class Checkpoint:
    """A sequence classifier with one label, from a folder or hub name. Every method raises UsageError, in one line."""

    def __init__(self, name: str, section: RewardModelSection, source: str) -> None:
        self.section, self.source = section, source
        self._name = name
        self.config = self._one_label(self.read("config", AutoConfig.from_pretrained))
        tokenizer = self.read("tokenizer", AutoTokenizer.from_pretrained)
        self.pad_id = self._pad_id(self.config, tokenizer)
        self.reader = TextReader(
            tokenizer, max_tokens=self._max_tokens(self.config, tokenizer), chat=self._chat(tokenizer)
        )

    def untrained(self, lacking: str) -> UsageError:
        """What to raise when the weights named are not in the checkpoint."""
        return self.wrong(f"its weights lack {lacking}: it was not trained to score; expected a reward model")

    def read(self, what: str, reader: Any, **more: Any) -> Any:
        """What `reader` makes of the checkpoint."""
        try:
            return reader(self.source, **more)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise self.wrong(f"no {what} to be read ({reason})") from error

    def _one_label(self, config: Any) -> Any:
        if config.num_labels != 1:
            raise self.wrong(f"it has {config.num_labels} labels; expected a model with one (num_labels = 1)")
        return config

    def _pad_id(self, config: Any, tokenizer: Any) -> int:
        known = [config.get_text_config().pad_token_id, tokenizer.pad_token_id]
        pad_id = next((one for one in known if one is not None), None)
        if pad_id is None:
            raise self.wrong("neither its configuration nor its tokenizer has a pad token; expected pad_token_id")
        config.get_text_config().pad_token_id = pad_id  # the model finds a text's last token by it
        return int(pad_id)

    def _chat(self, tokenizer: Any) -> bool:
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if self.section.chat and not has_template:
            raise self.wrong("chat is true, but its tokenizer has no chat template: set chat = false")
        return has_template if self.section.chat is None else self.section.chat

    def _max_tokens(self, config: Any, tokenizer: Any) -> int:
        said = [getattr(config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length]
        takes = min((int(limit) for limit in said if limit and limit < 1 << 30), default=_DEFAULT_MAX_TOKENS)
        wanted = self.section.max_tokens or takes
        if wanted > takes:
            raise self.wrong(f"max_tokens is {wanted}; expected at most {takes}, which the model takes")
        return wanted

    def wrong(self, what: str) -> UsageError:
        """The same for anything else, with the model's name and place."""
        return UsageError(f"reward model {self._name} at {self.source}: {what}")
