"""vLLM behind forebay's verbs: log-probabilities, versions to the token, installs in flight and installs that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from forebay.sampler.engine import Engine, HostCopy
from forebay.sampler.errors import InstallFailed
from forebay.sampler.generation import Generation
from forebay.wire.version import Version
from tests.sampler.conftest import host_copy

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

FIRST, SECOND = Version(1, 0), Version(1, 1)
PROMPT = list(range(2, 42))  # longer than a cache block
SAME = 2e-4  #: float noise between vLLM's kernels and transformers'


@pytest.fixture(scope="module")
def folders(checkpoint: Path, make_checkpoint: Callable[[int], Path]) -> dict[Version, Path]:
    return {FIRST: checkpoint, SECOND: make_checkpoint(1)}


@pytest.fixture(scope="module")
def copies(folders: dict[Version, Path]) -> dict[Version, HostCopy]:
    return {version: host_copy(folder, version) for version, folder in folders.items()}


@pytest_asyncio.fixture(loop_scope="session")
async def serving(engine: Engine, copies: dict[Version, HostCopy]) -> AsyncIterator[Engine]:
    """The engine, at FIRST whatever the test before did."""
    if engine.version is None:
        await engine.adopt(copies[FIRST])
    elif engine.version != FIRST:
        await engine.install(copies[FIRST], put_back=_nothing)
    yield engine


def _nothing() -> None:
    """These copies lie apart: what served is whole at any time."""


@torch.no_grad()
def recomputed(folder: Path, generation: Generation, prompt: list[int]) -> np.ndarray[Any, Any]:
    """Log-probabilities [T] of the reply's tokens under the weights in `folder`, by transformers."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([prompt + generation.tokens.tolist()])
    logits_tv = model(tokens).logits[0, len(prompt) - 1 : -1]
    chosen_t1 = torch.from_numpy(generation.tokens.astype(np.int64))[:, None]
    return logits_tv.log_softmax(-1).gather(-1, chosen_t1)[:, 0].numpy()


async def ask(engine: Engine, name: str, *, seed: int = 0, max_tokens: int = 16, greedy: bool = False) -> Generation:
    return await engine.generate(PROMPT, seed=seed, max_tokens=max_tokens, request_id=name, greedy=greedy)


async def test_reply_has_true_logprobs_and_one_span(serving: Engine, folders: dict[Version, Path]) -> None:
    reply = await ask(serving, "plain")
    assert [(span.start, span.version) for span in reply.spans] == [(0, FIRST)]
    np.testing.assert_allclose(reply.logprobs, recomputed(folders[FIRST], reply, PROMPT), atol=SAME)


async def test_seed_decides_the_reply(serving: Engine) -> None:
    first, again, other = await asyncio.gather(
        ask(serving, "a", seed=5), ask(serving, "b", seed=5), ask(serving, "c", seed=6)
    )
    assert first.tokens.tolist() == again.tokens.tolist()
    assert first.tokens.tolist() != other.tokens.tolist()


async def test_install_in_flight_is_right_to_the_token(
    serving: Engine, folders: dict[Version, Path], copies: dict[Version, HostCopy]
) -> None:
    asked = [asyncio.create_task(ask(serving, f"flight-{n}", seed=n, max_tokens=300)) for n in range(8)]
    warm = await ask(serving, "flight-short", seed=99, max_tokens=20)  # when it is done the others are under way
    assert warm.spans[0].version == FIRST
    pause_s = await serving.install(copies[SECOND], put_back=_nothing)
    replies = await asyncio.gather(*asked)

    mixed = [reply for reply in replies if len(reply.spans) == 2]
    assert mixed, "no request was in flight during the install"
    assert pause_s < 30
    for reply in mixed:
        assert [span.version for span in reply.spans] == [FIRST, SECOND]
        cut = reply.spans[1].start
        under = {version: recomputed(folder, reply, PROMPT) for version, folder in folders.items()}
        np.testing.assert_allclose(reply.logprobs[:cut], under[FIRST][:cut], atol=SAME)
        np.testing.assert_allclose(reply.logprobs[cut:], under[SECOND][cut:], atol=SAME)
        assert np.abs(reply.logprobs[:cut] - under[SECOND][:cut]).mean() > 0.1
        assert np.abs(reply.logprobs[cut:] - under[FIRST][cut:]).mean() > 0.1
        assert np.abs(reply.logprobs[cut] - under[FIRST][cut]) > SAME
        assert np.abs(reply.logprobs[cut - 1] - under[SECOND][cut - 1]) > SAME


async def test_requests_in_flight_may_keep_what_they_cached(
    serving: Engine, folders: dict[Version, Path], copies: dict[Version, HostCopy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on, under the new weights but over the old keys and values; whoever comes later meets none of these."""
    monkeypatch.setattr(serving, "_sampling", serving._sampling.model_copy(update={"in_flight": "keep"}))
    asked = [asyncio.create_task(ask(serving, f"kept-{n}", seed=n, max_tokens=300)) for n in range(8)]
    await ask(serving, "kept-short", seed=99, max_tokens=20)
    await serving.install(copies[SECOND], put_back=_nothing)
    later = await ask(serving, "kept-later")  # while the others still hold the same prompt's blocks
    np.testing.assert_allclose(later.logprobs, recomputed(folders[SECOND], later, PROMPT), atol=SAME)
    mixed = [reply for reply in await asyncio.gather(*asked) if len(reply.spans) == 2]
    assert mixed, "no request was in flight during the install"
    for reply in mixed:
        cut = reply.spans[1].start
        under = {version: recomputed(folder, reply, PROMPT) for version, folder in folders.items()}
        np.testing.assert_allclose(reply.logprobs[:cut], under[FIRST][:cut], atol=SAME)
        for version in under:  # neither version alone explains what came after
            assert np.abs(reply.logprobs[cut:] - under[version][cut:]).mean() > SAME


async def test_prefix_cache_does_not_mix_versions(
    serving: Engine, folders: dict[Version, Path], copies: dict[Version, HostCopy]
) -> None:
    await ask(serving, "fill")  # the prompt's block is cached now, under FIRST
    await serving.install(copies[SECOND], put_back=_nothing)
    reply = await ask(serving, "after")
    assert {span.version for span in reply.spans} == {SECOND}
    np.testing.assert_allclose(reply.logprobs, recomputed(folders[SECOND], reply, PROMPT), atol=SAME)


def _broken(copy: HostCopy, how: str, folders: dict[Version, Path]) -> HostCopy:
    if how == "no such memory":
        return replace(copy, path="/proc/self/fd/987654")
    if how == "shorter than it says":
        return replace(copy, nbytes=copy.nbytes * 2)
    if how == "a tensor is missing":
        return host_copy(folders[SECOND], copy.version, drop="model.layers.2.self_attn.v_proj.weight")
    if how == "an unknown tensor":  # found only after the others have been loaded
        return replace(copy, layout=[*copy.layout, dict(copy.layout[-1], name="model.zeros.weight")])
    wrong = dict(
        copy.layout[-1], shape=[3, copy.layout[-1]["nbytes"] // 12], nbytes=copy.layout[-1]["nbytes"] // 12 * 12
    )
    return replace(copy, layout=[*copy.layout[:-1], wrong])


@pytest.mark.parametrize(
    "how", ["no such memory", "shorter than it says", "a tensor is missing", "a shape is wrong", "an unknown tensor"]
)
async def test_failed_install_keeps_the_old_version_serving(
    serving: Engine, folders: dict[Version, Path], copies: dict[Version, HostCopy], how: str
) -> None:
    asked = asyncio.create_task(ask(serving, f"kept-{how}", max_tokens=200))
    with pytest.raises(InstallFailed, match=r"1\.1 could not be installed"):
        await serving.install(_broken(copies[SECOND], how, folders), put_back=_nothing)
    assert serving.version == FIRST
    for reply in (await asked, await ask(serving, f"next-{how}", seed=3)):
        assert {span.version for span in reply.spans} == {FIRST}
        np.testing.assert_allclose(reply.logprobs, recomputed(folders[FIRST], reply, PROMPT), atol=SAME)


async def test_cancelling_the_caller_aborts_the_request(serving: Engine) -> None:
    asked = asyncio.create_task(ask(serving, "cancelled", max_tokens=400))
    await ask(serving, "beside", max_tokens=4)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await ask(serving, "afterwards", max_tokens=4)
    assert serving._llm.get_num_unfinished_requests() == 0
