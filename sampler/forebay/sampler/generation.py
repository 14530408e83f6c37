"""One reply of the engine, and what it takes to ask for one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.sampler.errors import GenerationFailed
from forebay.wire.trajectory import VersionSpan
from forebay.wire.version import Version

FINISH_REASONS = frozenset({"stop", "length"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """What the policy said, and under which weights. T = generated tokens, the end token included."""

    tokens: NDArray[np.int32]  #: shape [T]
    logprobs: NDArray[np.float32]  #: shape [T]; after temperature and top-p
    spans: tuple[VersionSpan, ...]  #: covers [0, T)
    finish_reason: str  #: stop | length
    seconds: float


def request_seed(run_seed: int, group_id: int, member: int) -> int:
    """A seed of 63 bits that no two members of a run share; the same whoever generates them."""
    text = f"{run_seed}/{group_id}/{member}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def from_vllm(output: Any, seconds: float) -> Generation:
    """Read vLLM's finished `CompletionOutput`. Raises GenerationFailed when anything a learner needs is missing."""
    if output.finish_reason not in FINISH_REASONS:
        raise GenerationFailed(f"vLLM ended the request with {output.finish_reason!r}")
    tokens = np.asarray(output.token_ids, dtype=np.int32)
    logprobs = _sampled_logprobs(output.logprobs, tokens)
    spans = _spans(output.weight_versions or (), len(tokens))
    return Generation(
        tokens=tokens, logprobs=logprobs, spans=spans, finish_reason=output.finish_reason, seconds=seconds
    )


def _sampled_logprobs(flat: Any, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """vLLM puts the sampled token first at each position."""
    starts = flat.start_indices
    if len(starts) != len(tokens) or any(flat.token_ids[at] != token for at, token in zip(starts, tokens, strict=True)):
        raise GenerationFailed("vLLM's log-probabilities do not belong to its tokens")
    logprobs = np.asarray([flat.logprobs[at] for at in starts], dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise GenerationFailed("a sampled token's log-probability is not finite")
    return logprobs


def _spans(reported: Sequence[Any], tokens: int) -> tuple[VersionSpan, ...]:
    if not reported or reported[0].start != 0 or reported[-1].end != tokens:
        raise GenerationFailed(f"vLLM's version spans do not cover the {tokens} tokens of the reply")
    return tuple(VersionSpan(start=span.start, version=Version.parse(span.version)) for span in reported)
