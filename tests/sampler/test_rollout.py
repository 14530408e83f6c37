"""Permits to groups in the buffer: whole, retried, dropped with a reason, handed back; an error is never reward 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny_model import character_tokenizer
from forebay.buffer.client import Lease
from forebay.buffer.conservation import imbalances, ledger_response
from forebay.buffer.server import BufferServer
from forebay.config.models import RunFile
from forebay.sampler import rollout as rollout_module
from forebay.sampler.activity import Activity
from forebay.sampler.beside import end
from forebay.sampler.errors import EngineDied, GenerationFailed
from forebay.sampler.evaluate import Examiner
from forebay.sampler.filters import why_filtered
from forebay.sampler.generation import Generation
from forebay.sampler.judge import Judge
from forebay.sampler.orders import Orders
from forebay.sampler.producer import Producer
from forebay.sampler.prompts import Prompter
from forebay.sampler.receiver import WeightReceiver
from forebay.sampler.rewards.pool import RewardPool
from forebay.sampler.rollout import Rollout
from forebay.sampler.shipper import Shipper
from forebay.sampler.tasks import load_task
from forebay.sampler.tasks.answers import AnswerExtractor
from forebay.sampler.tasks.order import prompt_index
from forebay.wire.experience import decode_frame
from forebay.wire.logprobs import COMPACT_BOUND
from forebay.wire.trajectory import Trajectory
from tests.sampler.support import (
    Learner,
    RecordingEngine,
    base_state,
    buffer_with_learner,
    nudged,
    sampler_client,
    soon,
    two_tokens,
)


class Bench:
    """A whole sampler but for vLLM, on a real buffer."""

    def __init__(self, run: RunFile, server: BufferServer, learner: Learner) -> None:
        self.run, self.server, self.learner = run, server, learner
        self.engine, self.orders, self.activity = RecordingEngine(reply=two_tokens), Orders(), Activity()

    @property
    def ledger(self) -> dict[str, int]:
        """Groups by state."""
        counts: dict[str, int] = {}
        for row in self.rows:
            counts[row.state] = counts.get(row.state, 0) + row.groups
        return counts

    @property
    def rows(self) -> list[Any]:
        from forebay.buffer.conservation import ledger_response

        return list(ledger_response(self.server.reservoirs[0].state).rows)

    async def lease(self, step: int) -> list[Trajectory]:
        answer = await self.learner.client.lease(step, 30.0)
        assert isinstance(answer, Lease)
        found = [trajectory for frame in answer.frames for trajectory in decode_frame(frame)]
        return [trajectory for trajectory in found if trajectory.group_id in answer.group_ids]


Start = Callable[..., Any]


@pytest.fixture
async def bench(run_file: RunFile, checkpoint: Path, tmp_path: Path) -> AsyncIterator[Start]:
    """A function that starts a bench with settings of its own, and returns it with the rollout's task."""
    cleanup: list[Callable[[], Any]] = []

    async def start(**changes: Any) -> tuple[Bench, asyncio.Task[None]]:
        run = _with(run_file, tmp_path, changes)
        context = buffer_with_learner(run)
        server, learner = await context.__aenter__()
        made = Bench(run, server, learner)
        client_context = sampler_client(server, run)
        client = await client_context.__aenter__()
        await learner.publish(0, base_state(checkpoint))
        receiver = WeightReceiver(client, checkpoint, "F32", made.activity)
        watching = asyncio.create_task(receiver.watch())
        await receiver.prove()
        await receiver.hand_over(made.engine)  # type: ignore[arg-type]
        following = asyncio.create_task(receiver.follow(made.engine))  # type: ignore[arg-type]
        pool = RewardPool(run.task, run.run.seed, workers=1)
        rolling = asyncio.create_task(_rollout(made, client, receiver, pool).run())
        cleanup.extend(
            [
                lambda: end(rolling, following, watching),
                lambda: asyncio.to_thread(pool.close),
                lambda: client_context.__aexit__(None, None, None),
                lambda: context.__aexit__(None, None, None),
            ]
        )
        return made, rolling

    yield start
    for step in cleanup:
        await step()


def _with(run_file: RunFile, folder: Path, changes: dict[str, Any]) -> RunFile:
    settings = run_file.model_dump()
    settings["run"]["folder"] = folder
    settings["task"]["heldout_prompts"] = 0
    settings["sampler"]["frame_linger_s"] = 0.01
    for key, value in changes.items():
        section, _, name = key.partition("__")
        settings[section][name] = value
    return RunFile.model_validate(settings)


def _rollout(bench: Bench, client: Any, receiver: WeightReceiver, pool: RewardPool) -> Rollout:
    run, engine = bench.run, bench.engine
    task = load_task(run.task, run.run.seed)
    prompter = Prompter(character_tokenizer(), run.task)
    judge = Judge(pool, AnswerExtractor(None), attempts=run.sampler.attempts)
    train, heldout = (
        prompter.encode_all([q.text for q in part], max_model_tokens=512) for part in (task.train, task.heldout)
    )
    return Rollout(
        client,
        receiver,
        Producer(run, engine, prompter, judge, bench.activity, questions=task.train, prompts=train),  # type: ignore[arg-type]
        Shipper(run, client, client.member),
        Examiner(run, engine, prompter, judge, questions=task.heldout, prompts=heldout),  # type: ignore[arg-type]
        bench.activity,
        bench.orders,
        slots=run.sampler.concurrent_groups,
        group_timeout_s=run.sampler.group_timeout_s,
        why_filtered=lambda group: why_filtered(group, run.learner),
    )


async def test_groups_are_whole_scored_and_of_the_prompt_their_id_says(bench: Start) -> None:
    made, _ = await bench()
    batch = await made.lease(1)
    run, prompter = made.run, Prompter(character_tokenizer(), made.run.task)
    task = load_task(run.task, run.run.seed)
    assert sorted(t.member for t in batch) == sorted(list(range(4)) * 2)
    for trajectory in batch:
        question = task.train[prompt_index(trajectory.group_id, len(task.train), run.run.seed)]
        assert prompter.reply_of(trajectory.prompt_tokens) == question.text
        assert trajectory.metadata == f'{{"n":{question.metadata["n"]}}}'
        assert trajectory.reward == 1.0  # token 4 is a digit
        assert trajectory.reward_parts == {"digits": 1.0}
        assert trajectory.oldest == made.learner.version


async def test_the_run_file_chooses_how_logprobs_travel(bench: Start) -> None:
    made, _ = await bench(sampler__logprobs="compact")
    sent = np.array([-0.5, -0.1], np.float32)
    for trajectory in await made.lease(1):
        assert not np.array_equal(trajectory.logprobs, sent)
        assert np.abs(trajectory.logprobs - sent).max() <= COMPACT_BOUND


async def test_members_have_seeds_of_their_own_that_a_repetition_repeats(bench: Start) -> None:
    seeds: dict[str, list[int]] = {}

    def reply(prompt: list[int], *, seed: int, request_id: str, **request: Any) -> Generation:
        seeds.setdefault(request_id.rsplit("-", 1)[0], []).append(seed)
        if len(seeds[request_id.rsplit("-", 1)[0]]) == 1:
            raise GenerationFailed("the first time always fails")
        return two_tokens(prompt, seed=seed, request_id=request_id, **request)

    made, _ = await bench()
    made.engine.reply = reply
    await made.lease(1)
    assert made.activity.dropped_groups == 0
    tried = [both for both in seeds.values() if len(both) == 2]
    assert all(first == second for first, second in tried)
    assert len({first for first, _ in tried}) == len(tried) >= 8


async def test_failed_generation_is_dropped_with_a_reason_never_reward_0(bench: Start) -> None:
    def reply(prompt: list[int], *, request_id: str, **request: Any) -> Generation:
        if request_id.startswith("group-1-"):
            raise GenerationFailed("broken")
        return two_tokens(prompt, request_id=request_id, **request)

    made, _ = await bench()
    made.engine.reply = reply
    batch = await made.lease(1)
    assert 1 not in {trajectory.group_id for trajectory in batch}
    assert made.ledger["refunded:generation_failed"] == 1
    assert made.activity.dropped_groups == 1


async def test_groups_without_a_difference_in_reward_are_replaced_and_counted(bench: Start) -> None:
    made, _ = await bench(learner__drop_zero_variance=True)
    await soon(lambda: made.ledger.get("dropped:zero_variance", 0) >= 2)
    assert made.ledger["produced"] == made.ledger["dropped:zero_variance"] + made.ledger.get("buffered", 0)
    assert made.server.reservoirs[0].state.given_back >= 2, "their capacity goes to others"
    assert not imbalances(ledger_response(made.server.reservoirs[0].state))


async def test_hanging_reward_is_killed_tried_again_and_counted(bench: Start, tmp_path: Path) -> None:
    options = {"hang_once": str(tmp_path / "hung")}
    made, _ = await bench(task__options=options, task__reward_timeout_s=0.5)
    await made.lease(1)
    assert made.activity.dropped_groups == 0


async def test_reward_that_always_hangs_drops_its_group(bench: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = await bench(task__reward_timeout_s=0.3, sampler__attempts=1)
    decode = Prompter.reply_of
    hangs = iter(["hang"])
    monkeypatch.setattr(Prompter, "reply_of", lambda self, tokens: next(hangs, None) or decode(self, tokens))
    await made.lease(1)
    await soon(lambda: made.ledger.get("refunded:reward_failed", 0) == 1)


async def test_group_out_of_time_is_dropped(bench: Start) -> None:
    made, _ = await bench(sampler__group_timeout_s=3.0)

    async def slow(request_id: str) -> None:
        if request_id.startswith("group-0-"):
            await asyncio.Event().wait()

    made.engine.before = slow
    await made.lease(1)
    await soon(lambda: made.ledger.get("refunded:group_timeout", 0) == 1)


async def test_newer_weights_wake_a_sampler_that_waits_for_permits(bench: Start, checkpoint: Path) -> None:
    made, _ = await bench(learner__max_staleness=0)
    await made.lease(1)
    await soon(lambda: made.activity.doing == "waiting: learner to publish step 1" or made.activity.running_groups == 0)
    async with asyncio.timeout(5):  # far below the long poll
        await made.learner.client.commit(1, 0, {})
        version = await made.learner.publish(1, nudged(base_state(checkpoint), 1))
        batch = await made.lease(2)
    assert {trajectory.oldest for trajectory in batch} == {version}


async def test_evaluation_scores_exactly_the_held_version(bench: Start, checkpoint: Path) -> None:
    asked: list[str] = []
    gate = asyncio.Event()
    made, _ = await bench(task__heldout_prompts=8)
    first = made.learner.version

    async def held_up(request_id: str) -> None:
        if request_id.startswith("eval-"):
            await gate.wait()
            asked.append(str(made.engine.version))

    made.engine.before = held_up
    await soon(lambda: made.activity.doing.startswith("evaluating"))
    newer = await made.learner.publish(1, nudged(base_state(checkpoint), 1))
    gate.set()
    await soon(lambda: made.engine.version == newer)
    status = await made.learner.client.status()
    assert asked == [str(first)] * 8
    (result,) = status.evals
    assert (result.score, result.stderr, result.prompts) == (1.0, 0.0, 8)


async def test_drain_hands_back_what_cannot_finish(bench: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_module, "DRAIN_GRACE_S", 0.3)
    made, rolling = await bench()
    made.engine.before = lambda request_id: asyncio.Event().wait()
    await soon(lambda: made.activity.running_groups == 4)
    made.orders.drain("the test says so")
    await rolling
    state = made.server.reservoirs[0].state
    assert len(state.permits) == 0
    assert sorted(state.again)[-4:] == sorted(state.again)
    assert len(state.again) == 4
    assert "refunded:drained" not in made.ledger


async def test_drain_lets_what_is_in_flight_finish(bench: Start) -> None:
    made, rolling = await bench(learner__max_staleness=0)
    release = asyncio.Event()
    made.engine.before = lambda request_id: release.wait()
    await soon(lambda: made.activity.running_groups == 2)
    made.orders.drain("the test says so")
    release.set()
    await rolling
    assert made.ledger["produced"] == 2
    assert not made.server.reservoirs[0].state.again


async def test_dead_engine_ends_the_rollout_at_once(bench: Start) -> None:
    made, rolling = await bench(learner__max_staleness=0)

    def dead(prompt: list[int], **request: Any) -> Generation:
        raise EngineDied("gone")

    made.engine.reply = dead
    with pytest.raises(EngineDied, match="gone"):
        async with asyncio.timeout(10):
            await rolling


async def test_finished_run_ends_the_rollout(bench: Start) -> None:
    made, rolling = await bench(learner__steps=1, learner__max_staleness=0)
    await made.lease(1)
    await made.learner.client.commit(1, 1, {})
    async with asyncio.timeout(30):
        await rolling
    assert made.orders.finished
