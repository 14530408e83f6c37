"""The groups of a frame as flat arrays, from trajectories and back: work on all members at once is what makes it fast.

Legend of shapes: g groups, n members, t generated tokens, p prompt tokens, s version spans, r reward parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.wire.errors import WireError
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.version import Version

Counts = NDArray[np.int64]

FLOATS = ("temperature", "top_p", "reward", "generated_s", "scored_s")
TEXTS = ("finish_reason", "trace", "metadata")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatGroups:
    """Members in order, group by group; the members of a group share a prompt."""

    group_ids: NDArray[np.uint64]  #: [g]
    attempts: NDArray[np.uint32]  #: [g]
    sizes: Counts  #: [g]; members
    prompt_lengths: Counts  #: [g]
    prompts: NDArray[np.int32]  #: [p]
    members: NDArray[np.uint32]  #: [n]
    lengths: Counts  #: [n]
    tokens: NDArray[np.int32]  #: [t]
    loss_mask: NDArray[np.bool_]  #: [t]
    logprobs: NDArray[np.float32]  #: [t]
    span_counts: Counts  #: [n]
    span_starts: NDArray[np.uint32]  #: [s]
    span_incarnations: NDArray[np.uint32]  #: [s]
    span_steps: NDArray[np.uint32]  #: [s]
    floats: NDArray[np.float64]  #: [5, n]; see FLOATS
    texts: Sequence[Sequence[str]]  #: [3, n]; see TEXTS
    part_counts: Counts  #: [n]
    part_names: Sequence[str]  #: [r]
    part_values: NDArray[np.float64]  #: [r]

    def check(self) -> None:
        """What must hold between members, spans and lengths. Raises WireError."""
        _check_spans(self)
        keys = np.repeat(np.arange(len(self.sizes), dtype=np.uint64) << np.uint64(32), self.sizes) | self.members
        if len(np.unique(keys)) != len(keys):
            raise WireError(f"a group has a member twice, among groups {self.group_ids[:8].tolist()}")

    def header_table(self) -> NDArray[np.uint64]:
        """What the header says of each group, shape [g, 9]; see `frame_header.GROUP_FIELDS`."""
        versions = self.span_incarnations.astype(np.uint64) << np.uint64(32) | self.span_steps
        spans = np.add.reduceat(self.span_counts, _starts(self.sizes))
        tokens = np.add.reduceat(self.lengths, _starts(self.sizes))
        oldest, newest = (extreme.reduceat(versions, _starts(spans)) for extreme in (np.minimum, np.maximum))
        numbers: list[NDArray[Any]] = [self.group_ids, self.attempts, self.sizes, self.prompt_lengths, tokens]
        for version in (oldest, newest):
            numbers += version >> np.uint64(32), version & _LOW
        return np.stack([column.astype(np.uint64) for column in numbers], axis=1)


_LOW = np.uint64(0xFFFFFFFF)


def _starts(lengths: Counts) -> Counts:
    return np.cumsum(lengths) - lengths


def _check_spans(flat: FlatGroups) -> None:
    """Spans must cover [0, length) of every member, each at least a token."""
    problem = "version spans do not cover the tokens of every member"
    if flat.span_counts.min(initial=1) < 1:
        raise WireError(problem)
    starts = flat.span_starts.astype(np.int64)
    ends = np.append(starts[1:], 0)
    ends[np.cumsum(flat.span_counts) - 1] = flat.lengths
    if np.any(starts[_starts(flat.span_counts)] != 0) or np.any(starts >= ends):
        raise WireError(problem)


# From trajectories


def gather(trajectories: Sequence[Trajectory], attempts: Mapping[int, int]) -> FlatGroups:
    """Groups in order of first appearance, checked. `attempts` by group id. Raises WireError."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    if not groups:
        raise WireError("a frame of 0 groups")
    members = [member for group in groups.values() for member in group]
    for group_id, group in groups.items():
        _check_group(group_id, group, attempts)
    prompts = [group[0].prompt_tokens for group in groups.values()]
    flat = FlatGroups(
        group_ids=_integers(groups, np.uint64),
        attempts=_integers((attempts[group_id] for group_id in groups), np.uint32),
        sizes=_lengths(groups.values()),
        prompt_lengths=_lengths(prompts),
        prompts=_joined(prompts, np.int32),
        members=_integers(map(attrgetter("member"), members), np.uint32),
        **_per_token(members),
        **_spans(members),
        floats=np.array([list(map(attrgetter(name), members)) for name in FLOATS], np.float64),
        texts=[list(map(attrgetter(name), members)) for name in TEXTS],
        **_parts(members),
    )
    flat.check()
    return flat


def _check_group(group_id: int, members: Sequence[Trajectory], attempts: Mapping[int, int]) -> None:
    if group_id not in attempts:
        raise WireError(f"group {group_id} has no permit: its attempt is unknown")
    prompt = members[0].prompt_tokens
    others = [member.prompt_tokens for member in members if member.prompt_tokens is not prompt]
    if others and {(len(other), other.tobytes()) for other in others} != {(len(prompt), prompt.tobytes())}:
        raise WireError(f"group {group_id} has members with different prompts")


def _per_token(members: Sequence[Trajectory]) -> dict[str, Any]:
    tokens, masks, logprobs = (
        list(map(attrgetter(name), members)) for name in ("tokens", "loss_mask", "logprobs")
    )  # fmt: skip
    lengths = _lengths(tokens)
    unequal = np.flatnonzero((lengths != _lengths(masks)) | (lengths != _lengths(logprobs)) | (lengths == 0))
    for row in unequal.tolist():
        where = f"group {members[row].group_id} member {members[row].member}"
        if not lengths[row]:
            raise WireError(f"{where} has no generated tokens: refund the group instead")
        raise WireError(f"{where}: {lengths[row]} tokens need as many mask entries and log-probabilities")
    return {
        "lengths": lengths,
        "tokens": _joined(tokens, np.int32),
        "loss_mask": _joined(masks, np.bool_),
        "logprobs": _joined(logprobs, np.float32),
    }


def _spans(members: Sequence[Trajectory]) -> dict[str, Any]:
    spans = [span for member in members for span in member.spans]
    versions = [span.version for span in spans]
    return {
        "span_counts": _lengths(map(attrgetter("spans"), members)),
        "span_starts": _integers(map(attrgetter("start"), spans), np.uint32),
        "span_incarnations": _integers(map(attrgetter("incarnation"), versions), np.uint32),
        "span_steps": _integers(map(attrgetter("step"), versions), np.uint32),
    }


def _parts(members: Sequence[Trajectory]) -> dict[str, Any]:
    parts = list(map(attrgetter("reward_parts"), members))
    return {
        "part_counts": _lengths(parts),
        "part_names": [name for own in parts for name in own],
        "part_values": np.array([value for own in parts for value in own.values()], np.float64),
    }


def _lengths(values: Iterable[Any]) -> Counts:
    return np.array(list(map(len, values)), np.int64)


def _joined(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.ascontiguousarray(np.concatenate(arrays), dtype)


def _integers(values: Iterable[int], dtype: type[np.unsignedinteger]) -> NDArray[Any]:
    try:
        return np.array(list(values), dtype)
    except OverflowError as error:
        raise WireError(f"a number that does not fit its column: {error}") from error


# Back to trajectories


def scatter(flat: FlatGroups) -> list[Trajectory]:
    """The trajectories of checked groups. Their arrays are views of the flat ones; a group has one prompt array."""
    own, prompts = pieces(flat.lengths), cut(flat.prompts, flat.prompt_lengths)
    columns: dict[str, Iterable[Any]] = {
        "group_id": np.repeat(flat.group_ids, flat.sizes).tolist(),
        "member": flat.members.tolist(),
        "prompt_tokens": [prompts[row] for row in np.repeat(np.arange(len(prompts)), flat.sizes).tolist()],
        "tokens": list(map(flat.tokens.__getitem__, own)),
        "loss_mask": list(map(flat.loss_mask.__getitem__, own)),
        "logprobs": list(map(flat.logprobs.__getitem__, own)),
        "spans": _span_tuples(flat),
        "reward_parts": _part_dicts(flat),
        **dict(zip(FLOATS, flat.floats.tolist(), strict=True)),
        **dict(zip(TEXTS, flat.texts, strict=True)),
    }  # fmt: skip
    return _built(columns, len(flat.members))


def _built(columns: Mapping[str, Iterable[Any]], count: int) -> list[Trajectory]:
    """Field by field: a frozen dataclass's own constructor takes five times as long, which short ones would feel."""
    rows: list[Trajectory] = list(map(object.__new__, repeat(Trajectory, count)))
    for field in fields(Trajectory):
        fill = getattr(Trajectory, field.name).__set__
        deque(map(fill, rows, columns[field.name]), maxlen=0)
    return rows


def _span_tuples(flat: FlatGroups) -> list[tuple[VersionSpan, ...]]:
    """Equal spans are one object: nearly all members of a frame have the same one."""
    known: dict[tuple[int, int, int], VersionSpan] = {}
    numbers = (flat.span_starts.tolist(), flat.span_incarnations.tolist(), flat.span_steps.tolist())
    spans = [known.get(key) or known.setdefault(key, _span(*key)) for key in zip(*numbers, strict=True)]
    return list(map(tuple, cut(spans, flat.span_counts)))


def _span(start: int, incarnation: int, step: int) -> VersionSpan:
    return VersionSpan(start=start, version=Version(incarnation, step))


def _part_dicts(flat: FlatGroups) -> list[dict[str, float]]:
    pairs = list(zip(flat.part_names, flat.part_values.tolist(), strict=True))
    parts = list(map(dict, cut(pairs, flat.part_counts)))
    if sum(map(len, parts)) != len(pairs):
        raise WireError("a reward part is named twice")
    return parts


def cut(whole: Any, lengths: Counts) -> list[Any]:
    """`whole` in consecutive pieces of `lengths`, which sum to its own."""
    return list(map(whole.__getitem__, pieces(lengths)))


def pieces(lengths: Counts) -> list[slice]:
    """Where the pieces of `lengths` lie that follow one another."""
    ends = np.cumsum(lengths).tolist()
    return list(map(slice, [0, *ends[:-1]], ends))
