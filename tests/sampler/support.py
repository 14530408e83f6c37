"""A real buffer in this process, a learner's hand on it, and an engine that only remembers what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forebay.buffer.client import BufferClient
from forebay.buffer.reservoir import open_reservoir
from forebay.buffer.server import BufferServer, serving
from forebay.config.identity import run_json
from forebay.config.models import RunFile
from forebay.sampler.engine import HostCopy
from forebay.sampler.errors import InstallFailed
from forebay.sampler.generation import Generation
from forebay.wire.trajectory import VersionSpan
from forebay.wire.version import Version
from forebay.wire.weights import HostState, encode_anchor, encode_delta

DEADLINE_S = 60.0


@dataclass(slots=True)
class Learner:
    """Joins as the learner and publishes states by hand."""

    client: BufferClient
    incarnation: int
    state: HostState | None = None
    version: Version | None = None

    async def publish(self, step: int, state: HostState) -> Version:
        """An anchor first and for other tensors, else deltas to what was published last."""
        version = Version(self.incarnation, step)
        if self.state is None or self.version is None or self.state.specs != state.specs:
            encoded = encode_anchor(state, version=version)
        else:
            encoded = encode_delta(self.state, state, version=version, base_version=self.version)
        await self.client.publish(encoded)
        self.state, self.version = HostState.allocate(state.specs), version
        self.state.copy_from(state)
        return version


@asynccontextmanager
async def buffer_with_learner(run: RunFile) -> AsyncIterator[tuple[BufferServer, Learner]]:
    """A buffer of its own folder, and its learner."""
    async with serving(open_reservoir(run)) as server, BufferClient(server.address) as client:
        joined = await client.join("learner", "learner", "local", "local", run_json(run))
        await client.rewind(0)
        yield server, Learner(client, joined.member.incarnation)


@asynccontextmanager
async def sampler_client(server: BufferServer, run: RunFile, name: str = "s0") -> AsyncIterator[BufferClient]:
    """A client that joined as a sampler."""
    async with BufferClient(server.address) as client:
        await client.join("sampler", name, run.sampler.fleet, run.sampler.region, run_json(run))
        yield client


def base_state(folder: Path, dtype: str = "F32") -> HostState:
    """The checkpoint's weights."""
    return HostState.from_safetensors(folder, dtype)


def nudged(state: HostState, seed: int, share: float = 0.02) -> HostState:
    """A copy with some elements of every tensor one step away: what an optimizer leaves."""
    rng = np.random.default_rng(seed)
    other = HostState.allocate(state.specs)
    other.copy_from(state)
    for name in other.names:
        bits = other.bits_of(name)
        at = rng.random(len(bits)) < share
        bits[at] += 1
    return other


@dataclass(slots=True)
class RecordingEngine:
    """Takes installs as `Engine` does; proves each by reading the memory that it is pointed at."""

    max_model_tokens: int = 512
    installed: list[tuple[str, str, bytes]] = field(default_factory=list)
    failures: int = 0
    version: Version | None = None
    serving: HostCopy | None = None
    reply: Callable[..., Generation] | None = None
    before: Callable[[str], Awaitable[object]] | None = None  #: awaited with the request id before each reply

    async def adopt(self, copy: HostCopy) -> None:
        self._take("adopt", copy)

    async def install(self, copy: HostCopy, *, put_back: Callable[[], None]) -> float:
        if self.failures:
            self.failures -= 1
            put_back()
            assert self.serving is not None
            self._check(self.serving)  # what served stands where it stood
            raise InstallFailed(f"version {copy.version} could not be installed: the test says so")
        self._take("install", copy)
        return 0.01

    async def generate(self, prompt: list[int], **request: Any) -> Generation:
        await (self.before(request["request_id"]) if self.before else asyncio.sleep(0))
        assert self.reply is not None
        return self.reply(prompt, version=self.version, **request)

    def _take(self, how: str, copy: HostCopy) -> None:
        self._check(copy)
        self.serving = copy
        self.installed.append((how, str(copy.version), copy.digest))
        self.version = copy.version

    @staticmethod
    def _check(copy: HostCopy) -> None:
        with open(copy.path, "rb") as memory:  # as a worker would: by path, from outside
            assert HostState.attach(copy.layout, memory.fileno()).digest() == copy.digest  # type: ignore[arg-type]


def two_tokens(prompt: list[int], *, version: Version, **request: Any) -> Generation:
    """A reply of two tokens, the end token last."""
    return Generation(
        tokens=np.array([4, 1], dtype=np.int32),
        logprobs=np.array([-0.5, -0.1], dtype=np.float32),
        spans=(VersionSpan(start=0, version=version),),
        finish_reason="stop",
        seconds=0.01,
    )


async def soon(condition: Callable[[], bool]) -> None:
    """Until it holds; a test that never gets there fails by its deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
