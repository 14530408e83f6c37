"""One group: G replies to one prompt, scored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.config.models import RunFile
from forebay.sampler.activity import Activity
from forebay.sampler.engine import Engine
from forebay.sampler.errors import GenerationFailed
from forebay.sampler.generation import Generation, request_seed
from forebay.sampler.judge import Judge, Judged
from forebay.sampler.prompts import Prompter
from forebay.sampler.tasks import Question
from forebay.sampler.tasks.order import prompt_index
from forebay.wire.trajectory import Trajectory
from forebay.wire.v1 import experience_pb2


class Producer:
    """Makes groups of permits. The group id alone decides the prompt and, with the member, the seed."""

    def __init__(
        self,
        run: RunFile,
        engine: Engine,
        prompter: Prompter,
        judge: Judge,
        activity: Activity,
        *,
        questions: Sequence[Question],
        prompts: Sequence[NDArray[np.int32]],
    ) -> None:
        """`prompts` are the token ids of `questions`, in the same order."""
        self._run, self._engine, self._prompter, self._judge = run, engine, prompter, judge
        self._activity, self._questions, self._prompts = activity, questions, prompts

    async def produce(self, permit: experience_pb2.Permit) -> list[Trajectory]:
        """The whole group. Raises GenerationFailed or RewardFailed when a member is lacking after all attempts."""
        index = prompt_index(permit.group_id, len(self._questions), self._run.run.seed)
        question, prompt = self._questions[index], self._prompts[index]
        replies = await self._generate(permit, prompt)
        texts = [self._prompter.reply_of(reply.tokens) for reply in replies]
        verdicts = await self._judge.judge(question, texts)
        return [
            self._trajectory(permit.group_id, member, question, prompt, reply, verdict)
            for member, (reply, verdict) in enumerate(zip(replies, verdicts, strict=True))
        ]

    async def _generate(self, permit: experience_pb2.Permit, prompt: NDArray[np.int32]) -> list[Generation]:
        """All members at once; the first that fails for good ends the others."""
        members = range(self._run.learner.group_size)
        tasks = [asyncio.ensure_future(self._member(permit, member, prompt)) for member in members]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _member(self, permit: experience_pb2.Permit, member: int, prompt: NDArray[np.int32]) -> Generation:
        room = self._engine.max_model_tokens - len(prompt)
        for attempt in range(1, self._run.sampler.attempts + 1):
            try:
                reply = await self._engine.generate(
                    prompt.tolist(),
                    seed=request_seed(self._run.run.seed, permit.group_id, member),
                    max_tokens=min(self._run.sampler.max_new_tokens, room),
                    request_id=f"group-{permit.group_id}-{permit.attempt}-{member}-{attempt}",
                )
            except GenerationFailed:
                if attempt == self._run.sampler.attempts:
                    raise
            else:
                self._activity.generated(len(reply.tokens))
                return reply
        raise AssertionError("attempts is positive")

    def _trajectory(
        self,
        group_id: int,
        member: int,
        question: Question,
        prompt: NDArray[np.int32],
        reply: Generation,
        verdict: Judged,
    ) -> Trajectory:
        return Trajectory(
            group_id=group_id,
            member=member,
            prompt_tokens=prompt,
            tokens=reply.tokens,
            loss_mask=np.ones(len(reply.tokens), dtype=np.bool_),
            logprobs=reply.logprobs,
            spans=reply.spans,
            temperature=self._run.sampler.temperature,
            top_p=self._run.sampler.top_p,
            reward=verdict.score.reward,
            reward_parts=dict(verdict.score.parts),
            finish_reason=reply.finish_reason,
            generated_s=reply.seconds,
            scored_s=verdict.seconds,
            metadata=json.dumps(dict(question.metadata), default=str, separators=(",", ":")),
        )
