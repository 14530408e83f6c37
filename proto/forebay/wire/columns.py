"""Trajectories as the columns that compress well, and back.

Prompts are kept once a group; tokens in byte planes of the narrowest width, without those that a member shares with
the one before it in its group; loss masks as run lengths; versions as spans. All of it is lossless, log-probabilities
excepted when the form is "compact".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.wire import logprobs
from forebay.wire.errors import WireError
from forebay.wire.planes import narrow, widen
from forebay.wire.storage import FLOATS, TEXTS, Columns, as_counts
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.version import Version

MAX_TOKENS = 1 << 22  #: generated tokens of a frame, and prompt tokens: bounds what a reader allocates


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group in a frame: its permit and its members, who share a prompt."""

    group_id: int
    attempt: int
    members: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if len({member.member for member in self.members}) != len(self.members):
            raise WireError(f"group {self.group_id} has a member twice")


def to_columns(groups: Sequence[Group], form: str) -> dict[str, Any]:
    """Columns of checked groups. `form` is that of the log-probabilities. Raises WireError."""
    members = [member for group in groups for member in group.members]
    shared = [count for group in groups for count in _shared(group.members)]
    planes, offset = logprobs.encode(np.concatenate([_float32(member.logprobs) for member in members]), form)
    return {
        "group_ids": _integers((group.group_id for group in groups), np.uint64),
        "attempts": _integers((group.attempt for group in groups), np.uint32),
        "group_members": _integers((len(group.members) for group in groups), np.uint32),
        "prompt_lengths": _integers((len(group.members[0].prompt_tokens) for group in groups), np.uint32),
        "members": _integers((member.member for member in members), np.uint32),
        "lengths": _integers((len(member.tokens) for member in members), np.uint32),
        "shared": _integers(shared, np.uint32),
        "token_planes": _token_planes(groups, members, shared),
        "logprob_planes": planes,
        "logprob_offset": np.array([offset], np.int64),
        **_mask_columns(members),
        **_span_columns(members),
        **{name: np.array([getattr(member, name) for member in members], np.float64) for name in FLOATS},
        **{name: [getattr(member, name) for member in members] for name in TEXTS},
        **_part_columns(members),
    }


def from_columns(columns: Columns, form: str) -> list[Group]:
    """The groups, with every count in the columns checked. Raises WireError."""
    sizes = as_counts(columns["group_members"], len(columns["group_ids"]), "group_members")
    members = _members(columns, sizes, form)
    attempts = as_counts(columns["attempts"], len(sizes), "attempts")
    ends = np.cumsum(sizes)
    return [
        Group(group_id=int(group_id), attempt=int(attempt), members=tuple(members[end - size : end]))
        for group_id, attempt, end, size in zip(columns["group_ids"], attempts, ends, sizes, strict=True)
    ]


def _members(columns: Columns, sizes: NDArray[np.int64], form: str) -> list[Trajectory]:
    count = len(columns["members"])
    lengths = as_counts(columns["lengths"], count, "lengths")
    if not len(sizes) or sizes.min() < 1 or sizes.sum() != count or lengths.min() < 1 or lengths.sum() > MAX_TOKENS:
        raise WireError(f"{len(sizes)} groups of {sizes.sum()} members, {count} members of {lengths.sum()} tokens")
    prompts, tokens = _read_tokens(columns, sizes, lengths)
    per_member = {
        "prompt_tokens": prompts,
        "tokens": tokens,
        "loss_mask": _cut(_read_masks(columns, lengths), lengths),
        "logprobs": _cut(_read_logprobs(columns, int(lengths.sum()), form), lengths),
        "spans": _read_spans(columns, lengths),
        "reward_parts": _read_parts(columns, count),
        **{name: as_list(columns[name], count, name) for name in (*FLOATS, *TEXTS)},
    }
    group_ids = np.repeat(columns["group_ids"], sizes).tolist()
    rows = zip(*per_member.values(), strict=True)
    return [
        Trajectory(group_id=group_id, member=member, **dict(zip(per_member, row, strict=True)))
        for group_id, member, row in zip(group_ids, columns["members"].tolist(), rows, strict=True)
    ]


def as_list(column: Any, count: int, name: str) -> list[Any]:
    """A column with one entry a member, as Python values. Raises WireError."""
    if len(column) != count:
        raise WireError(f"{len(column)} entries of {name} for {count} members")
    return list(column) if isinstance(column, list) else list(column.tolist())


# Tokens


def _shared(members: Sequence[Trajectory]) -> list[int]:
    return [0, *(_common_prefix(before.tokens, after.tokens) for before, after in pairwise(members))]


def _common_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length


def _token_planes(groups: Sequence[Group], members: Sequence[Trajectory], shared: Sequence[int]) -> NDArray[np.uint8]:
    prompts = [group.members[0].prompt_tokens for group in groups]
    rest = [member.tokens[count:] for member, count in zip(members, shared, strict=True)]
    return narrow(np.concatenate([*prompts, *rest]).astype(np.int32).view(np.uint32))


def _read_tokens(
    columns: Columns, sizes: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]]:
    """(prompt, tokens) of each member; the members of a group have one prompt array together."""
    prompt_lengths = as_counts(columns["prompt_lengths"], len(sizes), "prompt_lengths")
    shared = as_counts(columns["shared"], len(lengths), "shared")
    _check_shared(shared, lengths, sizes)
    prompt_total, stored_total = int(prompt_lengths.sum()), int((lengths - shared).sum())
    if prompt_total > MAX_TOKENS:
        raise WireError(f"{prompt_total} prompt tokens, at most {MAX_TOKENS} fit a frame")
    flat = widen(columns["token_planes"], prompt_total + stored_total).view(np.int32)
    prompts = _cut(flat[:prompt_total], prompt_lengths)
    per_member = [prompt for prompt, size in zip(prompts, sizes, strict=True) for _ in range(size)]
    return per_member, _unshare(_cut(flat[prompt_total:], lengths - shared), shared.tolist())


def _check_shared(shared: NDArray[np.int64], lengths: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    firsts = np.cumsum(sizes) - sizes
    before = np.concatenate([[0], lengths[:-1]])
    before[firsts] = 0
    if np.any(shared > np.minimum(lengths, before)):
        raise WireError("a member shares more tokens than it or the one before it has")


def _unshare(stored: list[NDArray[np.int32]], shared: list[int]) -> list[NDArray[np.int32]]:
    tokens: list[NDArray[np.int32]] = []
    for rest, count in zip(stored, shared, strict=True):
        tokens.append(np.concatenate([tokens[-1][:count], rest]) if count else rest)
    return tokens


def _read_logprobs(columns: Columns, count: int, form: str) -> NDArray[np.float32]:
    (offset,) = as_counts(columns["logprob_offset"], 1, "logprob_offset")
    return logprobs.decode(columns["logprob_planes"], int(offset), count, form)


# Masks


def _mask_columns(members: Sequence[Trajectory]) -> dict[str, Any]:
    runs = [_runs(np.asarray(member.loss_mask, np.bool_)) for member in members]
    return {"run_counts": _integers(map(len, runs), np.uint32), "runs": np.concatenate(runs).astype(np.uint32)}


def _runs(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Lengths of true, false, true, ... but for the last; the first is 0 when the mask starts false."""
    edges = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    starts = np.concatenate([[0], edges]) if mask[0] else np.concatenate([[0, 0], edges])
    return np.diff(starts)


def _read_masks(columns: Columns, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    counts = as_counts(columns["run_counts"], len(lengths), "run_counts")
    runs = as_counts(columns["runs"], int(counts.sum()), "runs")
    mask = np.ones(int(lengths.sum()), np.bool_)
    starts = np.cumsum(lengths) - lengths
    at = np.concatenate([[0], np.cumsum(counts)])
    for row in np.flatnonzero(counts):
        known = runs[at[row] : at[row + 1]]
        last = lengths[row] - known.sum()
        if last < 1:
            raise WireError(f"loss mask of {known.sum()} tokens and more for {lengths[row]}")
        values = np.arange(len(known) + 1) % 2 == 0
        mask[starts[row] : starts[row] + lengths[row]] = np.repeat(values, [*known, last])
    return mask


# Versions


def _span_columns(members: Sequence[Trajectory]) -> dict[str, Any]:
    spans = [span for member in members for span in member.spans]
    return {
        "span_counts": _integers((len(member.spans) for member in members), np.uint32),
        "span_starts": _integers((span.start for span in spans), np.uint32),
        "span_incarnations": _integers((span.version.incarnation for span in spans), np.uint32),
        "span_steps": _integers((span.version.step for span in spans), np.uint32),
    }


def _read_spans(columns: Columns, lengths: NDArray[np.int64]) -> list[tuple[VersionSpan, ...]]:
    counts = as_counts(columns["span_counts"], len(lengths), "span_counts")
    total = int(counts.sum())
    numbers = [
        as_counts(columns[name], total, name).tolist() for name in ("span_starts", "span_incarnations", "span_steps")
    ]
    spans = [VersionSpan(start=start, version=Version(*version)) for start, *version in zip(*numbers, strict=True)]
    per_member = [tuple(part) for part in _cut(spans, counts)]
    for row, length in zip(per_member, lengths.tolist(), strict=True):
        check_spans(row, length)
    return per_member


def check_spans(spans: Sequence[VersionSpan], length: int) -> None:
    """Spans must cover [0, length), each at least a token. Raises WireError."""
    starts = [span.start for span in spans]
    if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise([*starts, length])):
        raise WireError(f"version spans that start at {starts[:8]} do not cover {length} tokens")


# Reward parts


def _part_columns(members: Sequence[Trajectory]) -> dict[str, Any]:
    parts = [part for member in members for part in member.reward_parts.items()]
    return {
        "part_counts": _integers((len(member.reward_parts) for member in members), np.uint32),
        "part_names": [name for name, _ in parts],
        "part_values": np.array([value for _, value in parts], np.float64),
    }


def _read_parts(columns: Columns, count: int) -> list[dict[str, float]]:
    counts = as_counts(columns["part_counts"], count, "part_counts")
    total = int(counts.sum())
    pairs = list(
        zip(
            as_list(columns["part_names"], total, "part_names"),
            as_list(columns["part_values"], total, "part_values"),
            strict=True,
        )
    )
    parts = [dict(row) for row in _cut(pairs, counts)]
    if sum(map(len, parts)) != total:
        raise WireError("a reward part is named twice")
    return parts


# Arrays


def _cut(whole: Any, lengths: NDArray[np.int64]) -> list[Any]:
    """`whole` in consecutive pieces of `lengths`, which sum to its own."""
    ends = np.cumsum(lengths).tolist()
    return [whole[start:end] for start, end in pairwise([0, *ends])]


def _integers(values: Any, dtype: type[np.unsignedinteger]) -> NDArray[Any]:
    """Raises WireError for a number outside `dtype`."""
    try:
        return np.array(list(values), dtype)
    except OverflowError as error:
        raise WireError(f"a number that does not fit its column: {error}") from error


def _float32(values: Any) -> NDArray[np.float32]:
    return np.ascontiguousarray(values, np.float32)
