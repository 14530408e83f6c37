"""The sampler's engine and receiver at work, and a learner's updates for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.weight_load.example import updates
from benchmarks.weight_load.generation import Load
from forebay.buffer.client import BufferClient
from forebay.config.identity import run_json
from forebay.config.model_source import model_source
from forebay.config.models import RunFile
from forebay.sampler.activity import Activity
from forebay.sampler.engine import Engine
from forebay.sampler.prompts import Prompter
from forebay.sampler.receiver import SAFETENSORS_DTYPES, WeightReceiver
from forebay.sampler.tasks import load_task
from forebay.wire.weights import Encoded, HostState

UPDATE_DEADLINE_S = 120.0


@dataclass(slots=True, kw_only=True)
class Sampler:
    """What `forebay sampler` runs, but for the experience, which nobody wants here."""

    engine: Engine
    load: Load
    receiver: WeightReceiver
    activity: Activity
    learner: BufferClient
    updates: Iterator[Encoded]

    async def update(self) -> float:
        """Publish the next version and wait until the engine serves it, proved; for how long generation stood still."""
        return await self._update("recompute")

    async def update_keeping(self) -> float:
        """The same, but replies in flight keep what they cached (`sampler.in_flight`)."""
        return await self._update("keep")

    async def _update(self, in_flight: str) -> float:
        self.engine._sampling = self.engine._sampling.model_copy(update={"in_flight": in_flight})
        encoded = next(self.updates)
        await self.learner.publish(encoded)
        async with asyncio.timeout(UPDATE_DEADLINE_S):
            while (held := self.receiver.held) is None or held.digest != encoded.manifest.digest:
                await self.receiver.wait_change(held)
        return self.activity.update_pause_s

    async def reload(self) -> float:
        """vLLM's own way: pause, load the checkpoint's files anew, resume; for how long generation stood still."""
        llm = self.engine._llm
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
        paused = time.monotonic()
        await llm.collective_rpc("reload_weights")
        await llm.resume_generation()
        return time.monotonic() - paused


@asynccontextmanager
async def sampling(run: RunFile, versions: int) -> AsyncIterator[Sampler]:
    """A sampler that serves the learner's first version, with `versions` more at hand."""
    folder = Path(await asyncio.to_thread(model_source, run.model, run.run.seed))
    async with AsyncExitStack() as stack:
        learner = await stack.enter_async_context(BufferClient(run.buffer.listen))
        client = await stack.enter_async_context(BufferClient(run.buffer.listen))
        joined = await learner.join("learner", "learner", "", "", run_json(run))
        await learner.rewind(0)
        dtype = SAFETENSORS_DTYPES[run.publish.dtype]
        made = await asyncio.to_thread(_updates, folder, dtype, joined.member.incarnation, versions)
        await learner.publish(made.pop(0))
        await client.join("sampler", "s", "", "", run_json(run))
        activity = Activity()
        receiver = WeightReceiver(client, folder, dtype, activity)
        stack.callback(receiver.close)
        stack.callback(asyncio.create_task(receiver.watch()).cancel)
        engine = await Engine.start(run, folder, run.run.home / "engine.log")
        stack.callback(engine.stop)
        await receiver.prove()
        await receiver.hand_over(engine)
        stack.callback(asyncio.create_task(receiver.follow(engine)).cancel)
        load = Load(engine, run, await asyncio.to_thread(_prompts, run, folder, engine.max_model_tokens))
        yield Sampler(
            engine=engine, load=load, receiver=receiver, activity=activity, learner=learner, updates=iter(made)
        )


def _updates(folder: Path, dtype: str, incarnation: int, versions: int) -> list[Encoded]:
    stream = updates(HostState.from_safetensors(folder, dtype), incarnation)
    return [next(stream) for _ in range(versions + 1)]


def _prompts(run: RunFile, folder: Path, room: int) -> list[list[int]]:
    task = load_task(run.task, run.run.seed)
    prompter = Prompter.load(run.model.tokenizer or str(folder), run.task)
    return [list(map(int, ids)) for ids in prompter.encode_all((q.text for q in task.train), max_model_tokens=room)]
