"""Prompts: templates to token ids, and replies back to text."""

from __future__ import annotations

from typing import Any

import pytest

from examples.tiny_model import character_tokenizer
from forebay.config.models import TaskSection
from forebay.errors import UsageError
from forebay.sampler.prompts import Prompter


def section(**changes: Any) -> TaskSection:
    return TaskSection.model_validate({"name": "x:y", "chat": False, **changes})


def test_raw_text_with_template_and_system_prompt() -> None:
    prompter = Prompter(character_tokenizer(), section(prompt_template="q: {prompt}? ", system_prompt="sum. "))
    assert prompter.text_of("1+2") == "sum. q: 1+2? "
    assert prompter.reply_of(prompter.tokens_of("1+2")) == "sum. q: 1+2? "


def test_chat_template_puts_the_system_prompt_first() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    prompter = Prompter(tokenizer, section(chat=True, system_prompt="be brief"))
    assert prompter.text_of("1+2") == "system:be brief user:1+2 a:"


def test_special_tokens_are_not_part_of_a_reply() -> None:
    prompter = Prompter(character_tokenizer(), section())
    assert prompter.reply_of([*prompter.tokens_of("95"), 1]) == "95"


def test_what_cannot_work_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"has no chat template: set task\.chat = false"):
        Prompter(character_tokenizer(), section(chat=True))
    with pytest.raises(UsageError, match=r"expected \{prompt\} in it"):
        Prompter(character_tokenizer(), section(prompt_template="no place"))
    with pytest.raises(UsageError, match=r"set model\.tokenizer"):
        Prompter.load("/no/such/folder", section())
    with pytest.raises(UsageError, match=r"has 20 tokens, but prompt and reply together have 20"):
        Prompter(character_tokenizer(), section()).encode_all(["1" * 20], max_model_tokens=20)
