"""Reward models on vLLM's pooling engine: the scores of the transformers path, its refusals, no process left."""

from __future__ import annotations

import asyncio
import math
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from examples.tiny_model import character_tokenizer
from forebay.config.reward_section import RewardModelSection, RewardSection
from forebay.errors import UsageError
from forebay.reward.client import RewardModelClient
from forebay.reward.pooling import PoolingEngine
from forebay.reward.scorer import Problem, Scorer, Text
from forebay.reward.server import serving
from forebay.reward.service import load
from forebay.wire.v1 import reward_pb2
from tests.reward import models
from tests.reward.test_process import DEADLINE_S, Place

pytestmark = pytest.mark.engine
#: More than two of the blocks of 128 in which vLLM keeps what it has read on a CPU.
POSITIONS = 320


def section(**settings: object) -> RewardModelSection:
    return RewardModelSection.model_validate(
        {"path": "x", "address": "127.0.0.1:7090", "engine": "vllm", "tokens_per_batch": 1000, **settings}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = character_tokenizer()
    tokenizer.model_max_length = POSITIONS
    place = tmp_path_factory.mktemp("llama")
    # vLLM has no attention for heads of 16 on a CPU.
    return models.llama(place, tokenizer=tokenizer, max_position_embeddings=POSITIONS, head_dim=32)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Scorer:
    return load("m", section(path=str(folder)), 0)


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Scorer:
    return load("m", section(path=str(folder), engine="transformers"), 0)


def ragged() -> list[Text]:
    """Texts from one token to all that the model takes, some of them twice and some with the start of others."""
    draw = random.Random(0)
    longest = "".join(draw.choice("0123456789+=") for _ in range(POSITIONS))
    replies = [longest[:length] for length in (1, 2, 7, 64, 129, 200, 257, POSITIONS)] * 2
    replies += ["".join(draw.choice("0123456789+=") for _ in range(draw.randint(1, 90))) for _ in range(30)]
    tokenizer = character_tokenizer()
    return [Text(ids=np.asarray(tokenizer(reply)["input_ids"], np.int64)) for reply in replies]


def test_scores_are_the_raw_logits_of_the_transformers_path(engine: Scorer, classifier: Scorer) -> None:
    assert isinstance(engine, PoolingEngine)
    batch = ragged()
    together, again = engine.score(batch), engine.score(batch)
    expected = [classifier.score([one])[0] for one in batch]
    assert together == pytest.approx(expected, abs=1e-4)
    assert again == pytest.approx(expected, abs=1e-4)
    assert min(together) < 0 or max(together) > 1  # not squeezed into probabilities
    assert len({round(score, 2) for score in together}) > 10


async def test_the_service_gives_the_same_over_its_port(engine: Scorer, classifier: Scorer) -> None:
    replies = ["95", "1", "95+1", "1" * 100]
    asked = reward_pb2.Conversation(prompt="37+58=", completions=replies)
    expected = classifier.score([one for one in classifier.encode(asked) if isinstance(one, Text)])
    async with serving("m", engine, tokens_per_batch=1000) as server:
        client = RewardModelClient("m", server.address, timeout_s=30.0, patience_s=30.0)
        assert await client.score("", "37+58=", replies) == pytest.approx(expected, abs=1e-4)
        await client.close()
    assert len(set(expected)) == len(replies)


def test_what_is_too_long_is_a_problem_and_the_longest_is_not(engine: Scorer) -> None:
    fits, long = engine.encode(reward_pb2.Conversation(completions=["1" * POSITIONS, "1" * (POSITIONS + 1)]))
    assert isinstance(fits, Text)
    assert math.isfinite(engine.score([fits])[0])
    assert isinstance(long, Problem)
    assert long.kind == reward_pb2.ScoreError.TOO_LONG


async def test_the_service_ends_when_told_and_has_no_processes_to_leave(tmp_path: Path, folder: Path) -> None:
    place = Place(tmp_path)
    place.write(path=f'"{folder}"', engine='"vllm"')
    process = place.start()
    client = RewardModelClient("m", place.address, timeout_s=5.0, patience_s=5.0)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await client.ready()
            assert len(await client.score("", "37+58=", ["95", "96"])) == 2
        assert children(process.pid) == []
        process.send_signal(signal.SIGTERM)
        _, told = await asyncio.to_thread(process.communicate, None, DEADLINE_S)
    finally:
        process.kill()
        await client.close()
    assert process.returncode == 0, told
    assert "Traceback" not in told


def children(pid: int) -> list[str]:
    """Command lines of a process's children."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [child for task in tasks for child in (task / "children").read_text().split()]
    return [Path(f"/proc/{child}/cmdline").read_text() for child in found]


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
