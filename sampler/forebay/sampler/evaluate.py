"""Scoring on the held-out prompts, greedily: within a run, and by itself."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forebay.config.model_source import model_source
from forebay.config.models import RunFile
from forebay.errors import UsageError
from forebay.reward.client import RewardModels
from forebay.sampler.engine import Engine
from forebay.sampler.engine_settings import quiet_resource_tracker
from forebay.sampler.errors import GenerationFailed, RewardFailed, SamplerError
from forebay.sampler.judge import Judge, judge_of
from forebay.sampler.prompts import Prompter
from forebay.sampler.rewards.pool import RewardPool
from forebay.sampler.tasks import Question, load_task
from forebay.wire.v1 import control_pb2
from forebay.wire.version import Version

#: Requests that an evaluation keeps in flight at most.
_CONCURRENT = 256


class Examiner:
    """Asks every held-out question once, without sampling noise."""

    def __init__(
        self,
        run: RunFile,
        engine: Engine,
        prompter: Prompter,
        judge: Judge,
        *,
        questions: Sequence[Question],
        prompts: Sequence[NDArray[np.int32]],
    ) -> None:
        """`prompts` are the token ids of `questions`, in the same order."""
        self._run, self._engine, self._prompter, self._judge = run, engine, prompter, judge
        self._questions, self._prompts = questions, prompts
        self._examinations = 0

    async def examine(self, version: Version) -> control_pb2.EvalResult:
        """Mean and standard error over the prompts that could be scored, at the engine's weights, which are `version`.

        Raises SamplerError when more than one prompt in ten could not: that would be another score.
        """
        self._examinations += 1
        lane = asyncio.Semaphore(_CONCURRENT)
        asked = [self._ask(index, lane) for index in range(len(self._questions))]
        rewards = [reward for reward in await asyncio.gather(*asked) if reward is not None]
        if len(rewards) < 0.9 * len(asked):
            raise SamplerError(f"evaluation of {version}: only {len(rewards)} of {len(asked)} prompts could be scored")
        score, stderr = mean_and_error(rewards)
        return control_pb2.EvalResult(
            version=version.to_proto(), score=score, stderr=stderr, prompts=len(rewards), at_unix_s=time.time()
        )

    async def _ask(self, index: int, lane: asyncio.Semaphore) -> float | None:
        question, prompt = self._questions[index], self._prompts[index]
        async with lane:
            try:
                reply = await self._engine.generate(
                    prompt.tolist(),
                    seed=0,
                    max_tokens=min(self._run.sampler.max_new_tokens, self._engine.max_model_tokens - len(prompt)),
                    request_id=f"eval-{self._examinations}-{index}",
                    greedy=True,
                )
                (verdict,) = await self._judge.examine(question, [self._prompter.reply_of(reply.tokens)])
            except (GenerationFailed, RewardFailed):
                return None
        return verdict.score.reward


def mean_and_error(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error (0 for fewer than two)."""
    count = len(rewards)
    mean = math.fsum(rewards) / count
    if count < 2:
        return mean, 0.0
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1)
    return mean, math.sqrt(variance / count)


def evaluate(run: RunFile, checkpoint: str | None) -> control_pb2.EvalResult:
    """Score a checkpoint folder (the run's untrained model when None) with an engine of its own.

    Raises UsageError when there is no such checkpoint or no held-out prompt.
    """
    if run.task.heldout_prompts == 0:
        raise UsageError("task.heldout_prompts is 0: there is nothing to evaluate on")
    quiet_resource_tracker(os.environ)
    return asyncio.run(_evaluate(run, Path(checkpoint_folder(run, checkpoint))))


def checkpoint_folder(run: RunFile, checkpoint: str | None) -> str:
    """The folder to score. Raises UsageError."""
    if checkpoint is None:
        return model_source(run.model, run.run.seed)
    if (Path(checkpoint) / "adapter_config.json").is_file():
        raise UsageError(
            f"checkpoint {checkpoint}: an adapter without its model; merge it with peft (merge_and_unload, "
            "save_pretrained) and give that folder"
        )
    if not (Path(checkpoint) / "config.json").is_file():
        raise UsageError(f"checkpoint {checkpoint}: no checkpoint there (config.json is missing)")
    return checkpoint


async def _evaluate(run: RunFile, folder: Path) -> control_pb2.EvalResult:
    task = await asyncio.to_thread(load_task, run.task, run.run.seed)
    prompter = await asyncio.to_thread(Prompter.load, run.model.tokenizer or str(folder), run.task)
    pool = RewardPool(run.task, run.run.seed, workers=run.sampler.reward_workers)
    models = RewardModels(run)
    try:
        engine = await Engine.start(run, folder, run.run.home / "logs" / "eval-engine.log")
        try:
            texts = [question.text for question in task.heldout]
            prompts = prompter.encode_all(texts, max_model_tokens=engine.max_model_tokens)
            judge = judge_of(run, pool, models)
            examiner = Examiner(run, engine, prompter, judge, questions=task.heldout, prompts=prompts)
            return await examiner.examine(Version(0, 0))
        finally:
            engine.stop()
    finally:
        await models.close()
        pool.close()
