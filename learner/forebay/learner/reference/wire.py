"""Samples as questions to a reference service, and back.

Shape suffixes: t trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from forebay.learner.sample import Floats32, Sample
from forebay.wire.errors import WireError
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.v1 import reference_pb2
from forebay.wire.version import Version

_IDS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")


def to_request(model: str, samples: Sequence[Sample]) -> reference_pb2.LogprobsRequest:
    """What the answer's log-probabilities are asked with: those of the samples' trained tokens, in order."""
    request = reference_pb2.LogprobsRequest(model=model)
    for (_, prompt), members in groupby((sample.trajectory for sample in samples), _group_and_prompt):
        group = request.groups.add(prompt=prompt)
        for one in members:
            group.replies.add(
                tokens=one.tokens.astype(_IDS).tobytes(),
                wanted=one.loss_mask.astype(np.uint8).tobytes(),
                temperature=one.temperature,
                top_p=one.top_p,
            )
    return request


def from_request(request: reference_pb2.LogprobsRequest, *, vocabulary: int, longest: int) -> list[Sample]:
    """One sample a reply, in order. Raises WireError for what a model with so many tokens, and positions, cannot
    read."""
    return [
        _sample(number, group.prompt, reply, vocabulary, longest)
        for number, group in enumerate(request.groups)
        for reply in group.replies
    ]


def to_answer(parts_t: Sequence[Floats32]) -> reference_pb2.LogprobsResponse:
    """Log-probabilities of each sample that has trained tokens, in the order asked."""
    return reference_pb2.LogprobsResponse(logprobs=b"".join(part.astype(_LOGPROBS).tobytes() for part in parts_t))


def from_answer(answer: reference_pb2.LogprobsResponse, targets: int) -> Floats32:
    """Log-probabilities [t]. Raises WireError when they are not as many, or not finite."""
    if len(answer.logprobs) != targets * _LOGPROBS.itemsize:
        raise WireError(f"{len(answer.logprobs)} bytes of log-probabilities came for {targets} tokens")
    found_t = np.frombuffer(answer.logprobs, _LOGPROBS).astype(np.float32)
    if not np.isfinite(found_t).all():
        raise WireError("a log-probability is not finite")
    return found_t


def _group_and_prompt(trajectory: Trajectory) -> tuple[int, bytes]:
    return trajectory.group_id, trajectory.prompt_tokens.astype(_IDS).tobytes()


def _sample(number: int, prompt: bytes, reply: reference_pb2.Reply, vocabulary: int, longest: int) -> Sample:
    problems = _problems(prompt, reply, vocabulary, longest)
    if (problem := next(problems, None)) is not None:
        raise WireError(f"group {number}: {problem}")
    tokens = np.frombuffer(reply.tokens, _IDS).astype(np.int32)
    trajectory = Trajectory(
        group_id=number,
        member=0,
        prompt_tokens=np.frombuffer(prompt, _IDS).astype(np.int32),
        tokens=tokens,
        loss_mask=np.frombuffer(reply.wanted, np.uint8).astype(np.bool_),
        logprobs=np.zeros(len(tokens), np.float32),
        spans=(VersionSpan(start=0, version=Version(0, 0)),),
        temperature=reply.temperature,
        top_p=reply.top_p,
        reward=0.0,
    )
    return Sample(trajectory=trajectory)


def _problems(prompt: bytes, reply: reference_pb2.Reply, vocabulary: int, longest: int) -> Iterator[str]:
    if not prompt or len(prompt) % _IDS.itemsize or len(reply.tokens) % _IDS.itemsize:
        yield "token ids that are no whole numbers, or no prompt"
    ids: NDArray[np.int32] = np.frombuffer(prompt + reply.tokens, _IDS)
    if len(reply.wanted) * _IDS.itemsize != len(reply.tokens) or set(reply.wanted) - {0, 1}:
        yield "not one 0 or 1 for each token says whether it is asked for"
    if len(ids) > longest:
        yield f"prompt and reply have {len(ids)} tokens, the model takes {longest}"
    if ids.min() < 0 or ids.max() >= vocabulary:
        yield f"a token id outside 0 to {vocabulary - 1}"
    if not (math.isfinite(reply.temperature) and reply.temperature > 0 and 0 < reply.top_p <= 1):
        yield f"temperature {reply.temperature} and top_p {reply.top_p}"
