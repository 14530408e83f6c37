"""Rules and reward models together: weights, parts, and errors that stay errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.config.models import RunFile
from forebay.config.reward_section import RewardSection
from forebay.reward.client import RewardModels
from forebay.reward.server import serving
from forebay.sampler.errors import RewardFailed
from forebay.sampler.judge import Judge, combine, judge_of
from forebay.sampler.rewards.pool import RewardPool
from forebay.sampler.tasks import Question, Score
from tests.end_to_end.shells import free_ports
from tests.reward.support import DEADLINE_S, LetterScorer, run_file

QUESTION = Question(text="a=")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    run = run_file(tmp_path_factory.mktemp("run"), {})
    opened = RewardPool(run.task, 0, workers=1)
    yield opened
    opened.close()


@asynccontextmanager
async def judging(run: RunFile, pool: RewardPool) -> AsyncIterator[Judge]:
    async with asyncio.timeout(DEADLINE_S), RewardModels(run) as models:
        yield judge_of(run, pool, models)


def rewards(judged: list[Any]) -> list[float]:
    return [one.score.reward for one in judged]


async def test_rule_and_models_are_added_by_their_weights_and_all_are_parts(tmp_path: Path, pool: RewardPool) -> None:
    async with serving("a", LetterScorer()) as one, serving("b", LetterScorer()) as two:
        run = run_file(tmp_path, {"a": one.address, "b": two.address}, rule_weight=10.0)
        run = run.model_copy(update={"task": run.task.model_copy(update={"prompt_template": "aa{prompt}"})})
        models = run.reward.models | {"b": run.reward.models["b"].model_copy(update={"weight": -0.5})}
        run = run.model_copy(update={"reward": run.reward.model_copy(update={"models": models})})
        async with judging(run, pool) as judge:
            judged = await judge.judge(QUESTION, ["11", "1a", "aa"])
    assert rewards(judged) == [10 + 3 - 1.5, 5 + 4 - 2, 0 + 5 - 2.5]
    assert judged[1].score.parts == {"digits": 0.5, "rule": 0.5, "model.a": 4.0, "model.b": 4.0}
    assert all(one.seconds > 0 for one in judged)


async def test_a_rule_that_counts_nothing_is_not_asked(tmp_path: Path, pool: RewardPool) -> None:
    async with serving("a", LetterScorer()) as server:
        run = run_file(tmp_path, {"a": server.address}, rule_weight=0.0)
        async with judging(run, pool) as judge:
            judged = await judge.judge(QUESTION, ["raise", "aa"])  # the rule would raise
    assert rewards(judged) == [2.0, 3.0]
    assert judged[0].score.parts == {"model.a": 2.0}


async def test_heldout_replies_are_scored_by_the_rule_unless_told_otherwise(tmp_path: Path, pool: RewardPool) -> None:
    (port,) = free_ports(1)
    nobody = {"a": f"127.0.0.1:{port}"}
    async with judging(run_file(tmp_path, nobody, rule_weight=0.0), pool) as judge:
        examined = await judge.examine(QUESTION, ["1a", "11"])  # no reward model is needed for it
    assert rewards(examined) == [0.5, 1.0]
    async with serving("a", LetterScorer()) as server:
        run = run_file(tmp_path, {"a": server.address}, heldout="reward")
        async with judging(run, pool) as judge:
            assert rewards(await judge.examine(QUESTION, ["1a", "11"])) == [2.5, 2.0]


async def test_without_models_the_reward_is_the_rules_by_its_weight(tmp_path: Path, pool: RewardPool) -> None:
    async with judging(run_file(tmp_path, {}), pool) as judge:
        (plain,) = await judge.judge(QUESTION, ["1a"])
    assert (plain.score.reward, plain.score.parts) == (0.5, {"digits": 0.5})
    async with judging(run_file(tmp_path, {}, rule_weight=4.0), pool) as judge:
        (weighed,) = await judge.judge(QUESTION, ["1a"])
    assert (weighed.score.reward, weighed.score.parts) == (2.0, {"digits": 0.5, "rule": 0.5})


async def test_one_reply_without_a_score_fails_the_group(tmp_path: Path, pool: RewardPool) -> None:
    scorer = LetterScorer()
    async with serving("a", scorer) as server, judging(run_file(tmp_path, {"a": server.address}), pool) as judge:
        with pytest.raises(RewardFailed, match="reward model a: the model's score is nan"):
            await judge.judge(QUESTION, ["aa", "?"])
        with pytest.raises(RewardFailed, match="ZeroDivisionError: no letters"):
            await judge.judge(QUESTION, ["aa", "raise"])


async def test_one_model_of_two_that_cannot_be_reached_fails_the_group(tmp_path: Path, pool: RewardPool) -> None:
    (port,) = free_ports(1)
    async with serving("a", LetterScorer()) as server:
        run = run_file(tmp_path, {"a": server.address, "b": f"127.0.0.1:{port}"}, patience_s=0.3)
        async with judging(run, pool) as judge:
            with pytest.raises(RewardFailed, match=rf"reward model b at 127.0.0.1:{port} gave no score for 0.3 s"):
                await judge.judge(QUESTION, ["aa"])


async def test_scores_that_do_not_add_up_to_a_number_are_no_reward() -> None:
    reward = RewardSection.model_validate(
        {"rule_weight": 1e300, "models": {"a": {"path": "x", "address": "h:1", "weight": -1e308}}}
    )
    assert combine(reward, Score(reward=2.0), {"a": 0.0}).reward == 2e300
    with pytest.raises(RewardFailed, match="do not add up to a finite number"):
        combine(reward, Score(reward=0.0), {"a": 10.0})
    with pytest.raises(RewardFailed, match="do not add up to a finite number"):
        combine(reward, Score(reward=1e10), {"a": 1.0})
