"""A sampler but for vLLM, on a real buffer, with a reward model that comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model import character_tokenizer
from forebay.buffer.client import Lease
from forebay.buffer.conservation import balanced, ledger_response
from forebay.buffer.server import BufferServer
from forebay.config.models import RunFile
from forebay.errors import UsageError
from forebay.reward.client import RewardModels
from forebay.reward.server import serving
from forebay.sampler.activity import Activity
from forebay.sampler.beside import end
from forebay.sampler.evaluate import Examiner
from forebay.sampler.judge import judge_of
from forebay.sampler.orders import Orders
from forebay.sampler.producer import Producer
from forebay.sampler.prompts import Prompter
from forebay.sampler.receiver import WeightReceiver
from forebay.sampler.rewards.pool import RewardPool
from forebay.sampler.rollout import Rollout
from forebay.sampler.shipper import Shipper
from forebay.sampler.tasks import load_task
from forebay.wire.experience import decode_frame
from forebay.wire.trajectory import Trajectory
from tests.end_to_end.shells import free_ports
from tests.reward import models
from tests.reward.support import DEADLINE_S, LetterScorer, run_file
from tests.sampler.support import (
    Learner,
    RecordingEngine,
    base_state,
    buffer_with_learner,
    sampler_client,
    soon,
    two_tokens,
)


class Bench:
    """What a test looks at."""

    def __init__(self, server: BufferServer, learner: Learner, rolling: asyncio.Task[None]) -> None:
        self._server, self._learner, self.rolling = server, learner, rolling
        self.activity = Activity()
        self.doings: list[str] = []  #: every state that the sampler entered on account of a reward model

    def tell(self, doing: str) -> None:
        self.doings.append(doing)
        self.activity.now(doing)

    @property
    def refunded(self) -> dict[str, int]:
        """Groups that came to nothing, by the reason."""
        state = self._server.reservoirs[0].state
        ledger = ledger_response(state)
        assert balanced(ledger)
        states = {row.state: row.groups for row in ledger.rows}
        return {state: groups for state, groups in states.items() if state.startswith("refunded:")}

    async def lease(self, step: int) -> list[Trajectory]:
        async with asyncio.timeout(DEADLINE_S):
            answer = await self._learner.client.lease(step, DEADLINE_S)
        assert isinstance(answer, Lease)
        found = [trajectory for frame in answer.frames for trajectory in decode_frame(frame)]
        return [trajectory for trajectory in found if trajectory.group_id in answer.group_ids]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("weights"))


@asynccontextmanager
async def bench(run: RunFile, checkpoint: Path) -> AsyncIterator[Bench]:
    """The rollout runs while the body does."""
    engine, orders = RecordingEngine(reply=two_tokens), Orders()
    pool = RewardPool(run.task, run.run.seed, workers=1)
    async with buffer_with_learner(run) as (server, learner), sampler_client(server, run) as client:
        made = Bench(server, learner, None)  # type: ignore[arg-type]
        await learner.publish(0, base_state(checkpoint))
        receiver = WeightReceiver(client, checkpoint, "F32", made.activity)
        watching = asyncio.create_task(receiver.watch())
        await receiver.prove()
        await receiver.hand_over(engine)  # type: ignore[arg-type]
        async with RewardModels(run, tell=made.tell) as reward_models:
            rollout = _rollout(run, client, receiver, made, engine, orders, pool, reward_models)
            made.rolling = asyncio.create_task(rollout.run())
            try:
                yield made
            finally:
                await end(made.rolling, watching)
                await asyncio.to_thread(pool.close)


def _rollout(
    run: RunFile,
    client: Any,
    receiver: WeightReceiver,
    made: Bench,
    engine: Any,
    orders: Orders,
    pool: RewardPool,
    reward_models: RewardModels,
) -> Rollout:
    task, prompter = load_task(run.task, run.run.seed), Prompter(character_tokenizer(), run.task)
    judge = judge_of(run, pool, reward_models)
    prompts = prompter.encode_all([question.text for question in task.train], max_model_tokens=512)
    return Rollout(
        client,
        receiver,
        Producer(run, engine, prompter, judge, made.activity, questions=task.train, prompts=prompts),
        Shipper(run, client, client.member),
        Examiner(run, engine, prompter, judge, questions=[], prompts=[]),
        made.activity,
        orders,
        slots=run.sampler.concurrent_groups,
        group_timeout_s=run.sampler.group_timeout_s,
        scorable=judge.ready,
    )


async def test_every_trajectory_carries_the_whole_reward_and_its_parts(tmp_path: Path, checkpoint: Path) -> None:
    scorer = LetterScorer()
    async with serving("letters", scorer) as server:
        run = run_file(tmp_path, {"letters": server.address}, rule_weight=10.0, model__weight=2.0)
        async with bench(run, checkpoint) as made:
            batch = await made.lease(1)
    assert len(batch) == 8
    for trajectory in batch:  # prompts are `ab0=` and so on, replies are a digit
        assert trajectory.reward == 10.0 + 2.0
        assert trajectory.reward_parts == {"digits": 1.0, "rule": 1.0, "model.letters": 1.0}
    assert {conversation.prompt[:2] for conversation in scorer.seen} == {"ab"}


async def test_nothing_is_generated_before_the_model_answers_and_the_wait_has_a_name(
    tmp_path: Path, checkpoint: Path
) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    async with bench(run_file(tmp_path, {"letters": address}, patience_s=0.5), checkpoint) as made:
        await soon(lambda: len(made.doings) > 3)  # some tries, longer than the patience
        assert made.activity.doing.startswith(f"waiting: reward model letters at {address} (unavailable: ")
        assert made.activity.running_groups == 0
        async with serving("letters", LetterScorer(), listen=address):
            assert {trajectory.reward for trajectory in await made.lease(1)} == {2.0}
        assert made.refunded == {}
        assert "generating" in made.doings


async def test_a_model_that_is_lost_costs_groups_with_a_reason_and_never_reward_0(
    tmp_path: Path, checkpoint: Path
) -> None:
    (port,) = free_ports(1)
    scorer, address = LetterScorer(), f"127.0.0.1:{port}"
    async with bench(run_file(tmp_path, {"letters": address}, patience_s=0.5), checkpoint) as made:
        async with serving("letters", scorer, listen=address):
            first = await made.lease(1)
            scorer.judging.clear()
            scorer.gate.clear()
            await made._learner.client.commit(1, 0, {})
            await asyncio.to_thread(scorer.judging.wait, DEADLINE_S)
            await soon(lambda: bool(made.refunded))  # a group's patience is over
            scorer.gate.set()
        assert set(made.refunded) == {"refunded:reward_failed"}
        async with serving("letters", LetterScorer(), listen=address):
            second = await made.lease(2)
    assert {trajectory.reward for trajectory in (*first, *second)} == {2.0}


async def test_a_nan_costs_its_group_and_no_other(tmp_path: Path, checkpoint: Path) -> None:
    class Moody(LetterScorer):
        """NaN for one prompt in a dozen or so."""

        def score(self, batch: Any) -> list[float]:
            scores = super().score(batch)
            return [
                float("nan") if "7" in text else score for text, score in zip(self.batches[-1], scores, strict=True)
            ]

    async with serving("letters", Moody()) as server:
        run = run_file(tmp_path, {"letters": server.address})
        async with bench(run, checkpoint) as made:
            step = 0
            while not made.refunded:
                step += 1
                batch = await made.lease(step)
                assert {trajectory.reward for trajectory in batch} == {2.0}
                await made._learner.client.commit(step, 0, {})
        assert set(made.refunded) == {"refunded:reward_failed"}


async def test_another_model_at_the_address_ends_the_sampler_with_a_line(tmp_path: Path, checkpoint: Path) -> None:
    async with serving("digits", LetterScorer()) as server:
        run = run_file(tmp_path, {"letters": server.address})
        async with bench(run, checkpoint) as made:
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(UsageError, match=r"reward\.models\.letters\.address: .*no 'letters' here"):
                    await made.rolling
