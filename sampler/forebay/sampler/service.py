"""`forebay sampler`: one sampler of one run, until the run is finished or it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from forebay.buffer.client import BufferClient, Membership
from forebay.config.identity import run_json
from forebay.config.model_source import model_source
from forebay.config.models import RunFile
from forebay.errors import EXIT_DONE
from forebay.reward.client import RewardModels
from forebay.sampler.activity import Activity
from forebay.sampler.beside import beside
from forebay.sampler.engine import Engine
from forebay.sampler.engine_settings import quiet_resource_tracker
from forebay.sampler.evaluate import Examiner
from forebay.sampler.filters import why_filtered
from forebay.sampler.heartbeat import beat
from forebay.sampler.judge import Judge, judge_of
from forebay.sampler.orders import Orders
from forebay.sampler.producer import Producer
from forebay.sampler.prompts import Prompter
from forebay.sampler.receiver import SAFETENSORS_DTYPES, WeightReceiver
from forebay.sampler.rewards.pool import RewardPool
from forebay.sampler.rollout import Rollout
from forebay.sampler.shipper import Shipper
from forebay.sampler.tasks import LoadedTask, load_task

log = logging.getLogger("forebay.sampler")

#: An unreachable buffer must not keep a leaving sampler.
LEAVE_DEADLINE_S = 5.0


def serve(run: RunFile) -> int:
    """Generate for the run's buffer until it is finished, or SIGTERM or SIGINT (drain; a second one: at once).

    Returns the exit code. Raises UsageError for what a setting mends, EngineDied when vLLM is gone, Fenced when another
    process took this sampler's id.
    """
    return asyncio.run(_serve(run))


async def _serve(run: RunFile) -> int:
    quiet_resource_tracker(os.environ)
    orders = Orders()
    orders.listen_to_signals()
    sampler_id = run.sampler.id or f"{socket.gethostname()}-{secrets.token_hex(2)}"
    folder = Path(await asyncio.to_thread(model_source, run.model, run.run.seed))
    task = await asyncio.to_thread(load_task, run.task, run.run.seed)
    prompter = await asyncio.to_thread(Prompter.load, run.model.tokenizer or str(folder), run.task)
    async with BufferClient(run.sampler_target) as client:
        session = _Session(run, sampler_id, folder, task, prompter, client, orders)
        await session.live()
        await session.leave()
    return EXIT_DONE


@dataclass(slots=True)
class _Session:
    """One membership in a run: everything between joining and leaving."""

    run: RunFile
    sampler_id: str
    folder: Path
    task: LoadedTask
    prompter: Prompter
    client: BufferClient
    orders: Orders
    membership: Membership | None = None
    engine: Engine | None = None

    async def live(self) -> None:
        """Join, prove the weights while the engine starts, generate to the end."""
        run, activity = self.run, Activity()
        joining = self.client.join("sampler", self.sampler_id, run.sampler.fleet, run.sampler.region, run_json(run))
        self.membership = await self.orders.unless_stopped(joining)
        if self.membership is None:
            return
        log.info("joined run %s as %s", self.membership.run, self.sampler_id)
        lora, dtype = run.learner.lora, SAFETENSORS_DTYPES[run.publish.dtype]
        scaling = lora.scaling if lora is not None else None
        receiver = WeightReceiver(self.client, self.folder, dtype, activity, adapter_scaling=scaling)
        pool = RewardPool(run.task, run.run.seed, workers=run.sampler.reward_workers)
        models = RewardModels(run, tell=activity.now)
        try:
            await beside(
                self._generate(receiver, judge_of(run, pool, models), activity),
                beat(self.client, self.membership.heartbeat_s, activity, receiver, self.orders),
                receiver.watch(),
            )
        finally:
            await models.close()
            await asyncio.to_thread(pool.close)
            if self.engine is not None:
                self.engine.stop()
            receiver.close()

    async def _generate(self, receiver: WeightReceiver, judge: Judge, activity: Activity) -> None:
        self.engine = await self.orders.unless_stopped(self._ready_engine(receiver))
        if self.engine is None:
            return
        rollout = await asyncio.to_thread(self._rollout, self.engine, receiver, judge, activity)
        await beside(rollout.run(), receiver.follow(self.engine), self.engine.watch())

    async def _ready_engine(self, receiver: WeightReceiver) -> Engine:
        """An engine that serves the newest weights, proved. It starts while they are."""
        log_path = self.run.run.home / "samplers" / self.sampler_id / "engine.log"
        starting = Engine.start(self.run, self.folder, log_path)
        proving = asyncio.ensure_future(receiver.prove())
        try:
            engine = await starting
            await proving
            await receiver.hand_over(engine)
        finally:
            proving.cancel()
        return engine

    def _rollout(self, engine: Engine, receiver: WeightReceiver, judge: Judge, activity: Activity) -> Rollout:
        """Tokenizes every prompt: blocks."""
        run, task, room = self.run, self.task, engine.max_model_tokens
        assert self.membership is not None
        train = self.prompter.encode_all((question.text for question in task.train), max_model_tokens=room)
        heldout = self.prompter.encode_all((question.text for question in task.heldout), max_model_tokens=room)
        return Rollout(
            self.client,
            receiver,
            Producer(run, engine, self.prompter, judge, activity, questions=task.train, prompts=train),
            Shipper(run, self.client, self.membership.member),
            Examiner(run, engine, self.prompter, judge, questions=task.heldout, prompts=heldout),
            activity,
            self.orders,
            slots=run.sampler.concurrent_groups,
            group_timeout_s=run.sampler.group_timeout_s,
            why_filtered=lambda group: why_filtered(group, run.learner),
            scorable=judge.ready,
        )

    async def leave(self) -> None:
        """Say goodbye, if the buffer can be reached."""
        if self.membership is None:
            return
        reason = "the run is finished" if self.orders.finished else self.orders.reason
        try:
            async with asyncio.timeout(LEAVE_DEADLINE_S):
                await self.client.leave(reason)
        except TimeoutError:
            log.warning("left without a word: the buffer does not answer")
        log.info("left: %s", reason)
