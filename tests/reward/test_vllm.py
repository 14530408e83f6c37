"""Reward models on vLLM's pooling engine: the scores of the transformers path, and its refusals."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tiny_model import character_tokenizer
from forebay.config.reward_section import RewardModelSection, RewardSection
from forebay.errors import UsageError
from forebay.reward.client import RewardModelClient
from forebay.reward.errors import ScoreFailed
from forebay.reward.pooling import PoolingEngine
from forebay.reward.scorer import Scorer, Text
from forebay.reward.service import load
from forebay.wire.v1 import reward_pb2
from tests.reward import models
from tests.reward.test_process import DEADLINE_S, Place

pytestmark = [pytest.mark.engine, pytest.mark.end_to_end]
#: More than two of the blocks of 128 in which vLLM keeps what it has read on a CPU.
POSITIONS = 320


def section(**settings: object) -> RewardModelSection:
    return RewardModelSection.model_validate(
        {"path": "x", "address": "127.0.0.1:7090", "engine": "vllm", "tokens_per_batch": 1000, **settings}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pooling_model(tmp_path_factory.mktemp("llama"))


def pooling_model(place: Path) -> Path:
    """A reward model that vLLM takes."""
    tokenizer = character_tokenizer()
    tokenizer.model_max_length = POSITIONS
    # vLLM has no attention for heads of 16 on a CPU.
    return models.llama(place, tokenizer=tokenizer, max_position_embeddings=POSITIONS, head_dim=32)


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a service in a process of its own, as it always is: vLLM does not start beside all that the suite imports.

    In the end it is told to leave, and does so in order.
    """
    place = Place(tmp_path_factory.mktemp("service"))
    place.write(path=f'"{folder}"', engine='"vllm"')
    process = place.start()
    try:
        yield place.address
        assert children(process.pid) == []
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert "Traceback" not in told


def children(pid: int) -> list[str]:
    """Command lines of a process's children."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [child for task in tasks for child in (task / "children").read_text().split()]
    return [Path(f"/proc/{child}/cmdline").read_text() for child in found]


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Scorer:
    return load("m", section(path=str(folder), engine="transformers"), 0)


def ragged() -> list[str]:
    """Replies from one token to all that the model takes, some of them twice and some with the start of others."""
    draw = random.Random(0)
    longest = "".join(draw.choice("0123456789+=") for _ in range(POSITIONS))
    replies = [longest[:length] for length in (1, 2, 7, 64, 129, 200, 257, POSITIONS)] * 2
    return replies + ["".join(draw.choice("0123456789+=") for _ in range(draw.randint(1, 90))) for _ in range(30)]


async def test_scores_are_the_raw_logits_of_the_transformers_path(address: str, classifier: Scorer) -> None:
    replies = ragged()
    texts = classifier.encode(reward_pb2.Conversation(completions=replies))
    expected = [classifier.score([one])[0] for one in texts if isinstance(one, Text)]
    client = RewardModelClient("m", address, timeout_s=30.0, patience_s=30.0)
    async with asyncio.timeout(DEADLINE_S):
        await client.ready()
    for _ in range(2):  # the second time from what vLLM remembers
        found = await client.score("", "", replies)
        assert found == pytest.approx(expected, abs=1e-4)
    assert min(found) < 0 or max(found) > 1  # not squeezed into probabilities
    assert len({round(score, 2) for score in found}) > 10
    with pytest.raises(ScoreFailed, match="321 tokens"):
        await client.score("", "", ["1" * (POSITIONS + 1)])
    await client.close()


def test_several_labels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it has 3 labels; expected a model with one"):
        load("m", section(path=str(models.llama(tmp_path / "m", num_labels=3))), 0)


def test_pairs_with_token_types_are_left_to_transformers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='reads pairs with token types; expected engine = "transformers"'):
        load("m", section(path=str(models.bert(tmp_path / "m"))), 0)


def test_a_missing_vllm_is_told_with_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        PoolingEngine.load("m", section(), str(folder))
    assert str(caught.value) == 'reward.models.m.engine is "vllm", which needs vllm: pip install "forebay[sampler]"'


def test_a_device_is_refused_because_vllm_chooses_it() -> None:
    (told,) = RewardSection(models={"m": section(device="cpu")}).contradictions()
    assert told.startswith('reward.models.m.device is "cpu", but vLLM chooses its device itself')
