"""Hugging Face sequence classifiers as reward models: what they score, and which are refused with a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification, LlamaForSequenceClassification

from examples.tiny_model import character_tokenizer
from forebay.config.reward_section import RewardModelSection
from forebay.errors import UsageError
from forebay.reward.classifier import SequenceClassifier
from forebay.reward.scorer import Problem, Text
from forebay.reward.service import load
from forebay.wire.v1 import reward_pb2
from tests.reward import models

TASK = reward_pb2.Conversation(prompt="37+58=", completions=["95", "1", "?", "95 and more", ""])


def section(**settings: Any) -> RewardModelSection:
    return RewardModelSection.model_validate({"path": "x", "address": "127.0.0.1:7090", **settings})


def texts(found: list[Text | Problem]) -> list[Text]:
    assert all(isinstance(one, Text) for one in found), found
    return [one for one in found if isinstance(one, Text)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("llama"))


def test_scores_are_the_models_own_however_texts_are_batched(llama: Path) -> None:
    scorer = SequenceClassifier.load("m", section(), str(llama))
    encoded = texts(scorer.encode(TASK))
    together = scorer.score(encoded)
    assert together == pytest.approx([scorer.score([one])[0] for one in encoded], abs=1e-5)
    model = LlamaForSequenceClassification.from_pretrained(llama)
    tokenizer = character_tokenizer()
    with torch.inference_mode():
        for reply, score in zip(TASK.completions, together, strict=True):
            ids = tokenizer(TASK.prompt + reply, return_tensors="pt").input_ids
            assert score == pytest.approx(float(model(input_ids=ids).logits[0, 0]), abs=1e-5)
    assert len({round(score, 3) for score in together}) == len(together)


def test_a_padding_token_that_only_the_tokenizer_has_will_do(tmp_path: Path) -> None:
    scorer = SequenceClassifier.load("m", section(), str(models.llama(tmp_path / "m", pad_token_id=None)))
    encoded = texts(scorer.encode(TASK))
    assert scorer.score(encoded) == pytest.approx([scorer.score([one])[0] for one in encoded], abs=1e-5)


def test_an_encoder_judges_prompt_and_reply_as_a_pair(tmp_path: Path) -> None:
    scorer = SequenceClassifier.load("m", section(), str(models.bert(tmp_path / "bert")))
    encoded = texts(scorer.encode(reward_pb2.Conversation(prompt="37+58=", completions=["95", "5"])))
    assert encoded[0].parts is not None
    assert encoded[0].parts.tolist() == [0] * 8 + [1] * 3
    together = scorer.score(encoded)
    model = BertForSequenceClassification.from_pretrained(tmp_path / "bert")
    with torch.inference_mode():
        for one, score in zip(encoded, together, strict=True):
            inputs = {"input_ids": one.ids, "token_type_ids": one.parts}
            own = model(**{key: torch.as_tensor(value)[None] for key, value in inputs.items()}).logits
            assert score == pytest.approx(float(own[0, 0]), abs=1e-5)


def test_a_chat_template_is_applied_where_there_is_one_unless_told_otherwise(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = models.CHAT
    folder = str(models.llama(tmp_path / "chat", tokenizer=tokenizer))
    asked = reward_pb2.Conversation(system="be", prompt="1+1=", completions=["2"])
    plain = character_tokenizer()
    for settings, read in (
        ({}, "s:be.u:1+1=.a:2."),
        ({"chat": True}, "s:be.u:1+1=.a:2."),
        ({"chat": False}, "be1+1=2"),
    ):
        (one,) = texts(SequenceClassifier.load("m", section(**settings), folder).encode(asked))
        assert plain.decode(one.ids.tolist()) == read


def test_what_is_longer_than_the_model_takes_is_a_problem_and_never_cut(llama: Path) -> None:
    scorer = SequenceClassifier.load("m", section(max_tokens=10), str(llama))
    asked = reward_pb2.Conversation(prompt="37+58=", completions=["9", "95", "12345", "1" * 5000])
    first, second, long, huge = scorer.encode(asked)
    assert [len(one) for one in texts([first, second])] == [7, 8]
    assert isinstance(long, Problem)
    assert isinstance(huge, Problem)
    assert long.kind == huge.kind == reward_pb2.ScoreError.TOO_LONG
    assert long.message == "prompt and reply have 11 tokens, the reward model takes 10 tokens"
    assert huge.message == "prompt and reply have 5006 characters, the reward model takes 10 tokens"
    whole = SequenceClassifier.load("m", section(), str(llama))
    assert isinstance(whole.encode(reward_pb2.Conversation(completions=["1" * (models.POSITIONS + 1)]))[0], Problem)


def test_nothing_to_judge_is_a_problem(llama: Path) -> None:
    (found,) = SequenceClassifier.load("m", section(), str(llama)).encode(reward_pb2.Conversation(completions=[""]))
    assert isinstance(found, Problem)
    assert found.message == "prompt and reply are empty"


def _no_pad(folder: Path) -> Path:
    tokenizer = character_tokenizer()
    tokenizer.pad_token = None
    return models.llama(folder, tokenizer=tokenizer, pad_token_id=None)


def _no_tokenizer(folder: Path) -> Path:
    models.llama(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    return folder


def _of_llama(change: Callable[[Path, Path], Path]) -> Callable[[Path], Path]:
    return lambda folder: change(folder, models.llama(folder.with_name("source")))


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (lambda f: models.llama(f, num_labels=3), {}, "it has 3 labels; expected a model with one (num_labels = 1)"),
        (_no_pad, {}, "neither its configuration nor its tokenizer has a pad token; expected pad_token_id"),
        (_of_llama(models.without_head), {}, "its weights lack score.weight: it was not trained to score"),
        (_of_llama(models.pickled), {}, "no weights to be read ("),
        (_no_tokenizer, {}, "no tokenizer to be read ("),
        (models.llama, {"max_tokens": 65}, "max_tokens is 65; expected at most 64, which the model takes"),
        (models.llama, {"chat": True}, "chat is true, but its tokenizer has no chat template: set chat = false"),
        (models.llama, {"device": "warp:9"}, "device is 'warp:9': "),
    ],
    ids=["labels", "pad", "head", "pickle", "tokenizer", "max_tokens", "chat", "device"],
)
def test_what_is_no_reward_model_is_refused_in_one_line(
    tmp_path: Path, make: Callable[[Path], Path], settings: dict[str, Any], message: str
) -> None:
    folder = make(tmp_path / "model")
    with pytest.raises(UsageError) as caught:
        SequenceClassifier.load("m", section(**settings), str(folder))
    assert str(caught.value).startswith(f"reward model m at {folder}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_is_made_on_the_spot_or_missed_in_words_of_the_run_file(tmp_path: Path) -> None:
    made = section(path=str(tmp_path / "made"), make="tests.reward.models:make")
    (one,) = load("m", made, 0).encode(reward_pb2.Conversation(prompt="1+1=", completions=["2"]))
    assert isinstance(one, Text)
    assert (tmp_path / "made" / "config.json").is_file()
    with pytest.raises(UsageError, match=r'reward\.models\.m\.path is "./none": no such folder'):
        load("m", section(path="./none"), 0)
    with pytest.raises(UsageError, match=r'reward\.models\.m\.make is "nowhere:make": no module named nowhere'):
        load("m", section(path=str(tmp_path / "no"), make="nowhere:make"), 0)
