"""A sampler's engine under its task's load, and what counts of it: tokens of finished replies."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from forebay.config.models import RunFile
from forebay.sampler.engine import Engine


class Load:
    """Keeps as many requests in flight as the run file says, for as long as it is entered."""

    def __init__(self, engine: Engine, run: RunFile, prompts: Sequence[Any]) -> None:
        self._engine, self._prompts = engine, prompts
        self._max_tokens = run.sampler.max_new_tokens
        self._in_flight = run.sampler.concurrent_groups * run.learner.group_size
        self._numbers = itertools.count()
        self.tokens = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Generate during the body."""
        tasks = [asyncio.create_task(self._generate()) for _ in range(self._in_flight)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def tokens_s(self, seconds: float) -> float:
        """Tokens a second over the next `seconds`."""
        began, before = time.monotonic(), self.tokens
        await asyncio.sleep(seconds)
        return (self.tokens - before) / (time.monotonic() - began)

    async def _generate(self) -> None:
        while True:
            number = next(self._numbers)
            reply = await self._engine.generate(
                self._prompts[number % len(self._prompts)],
                seed=number,
                max_tokens=self._max_tokens,
                request_id=str(number),
            )
            self.tokens += len(reply.tokens)
