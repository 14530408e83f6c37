"""From trajectories to micro-batches: tokens laid end to end, each prompt once for its whole group, nothing padded.

A micro-batch is one row of n tokens. For every group it holds the prompt and then each member's generated tokens
without the last one (whose hidden state predicts nothing). Members attend to the prompt and to themselves; the
positions restart accordingly. Sharing the prompt changes no number beyond float noise and saves (G - 1) prompts a
group (Prefix Grouper, arXiv 2506.05433).

Shape suffixes: n packed tokens, t targets (generated tokens that are trained), g prompts, s replies, p longest
prompt, q longest reply of a tile, r rows of the padded tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.learner.sample import Floats32, Sample
from forebay.learner.tokens import Sequences
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.version import Version

if TYPE_CHECKING:
    from forebay.learner.sequence_parallel import Team

Ints = NDArray[np.int64]
#: Sequences share a padded attention tile while the shortest is at least this part of the longest.
TILE_RATIO = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyTile:
    """Replies of similar length, padded on the right, over the prompts of one prompt tile."""

    prompt_s: torch.Tensor  #: row of the prompt tile that each reply continues
    width: int  #: q
    mask_s1qk: torch.Tensor  #: bool; k = p + q keys: the prompt, padded on the left, then the reply


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTile:
    """Prompts of similar length, padded on the left so that all end in the same column, and their replies."""

    prompts: int  #: g
    width: int  #: p
    mask_g1pp: torch.Tensor  #: bool
    replies: tuple[ReplyTile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLayout:
    """Where packed tokens lie in the padded tiles that attention works on, and back.

    Rows of the tiles are numbered in the order: prompt tile, its reply tiles, next prompt tile, ...
    """

    tiles: tuple[PromptTile, ...]
    token_r: torch.Tensor  #: int64; packed token of each row, 0 for padding
    row_n: torch.Tensor  #: int64; row of each packed token
    padding: torch.Tensor  #: int64; the rows that are padding

    def to(self, device: torch.device) -> TileLayout:
        """The same layout on `device`."""
        return TileLayout(
            tiles=tuple(_tile_to(tile, device) for tile in self.tiles),
            token_r=self.token_r.to(device),
            row_n=self.row_n.to(device),
            padding=self.padding.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes."""

    tokens_n: torch.Tensor  #: int64
    positions_n: torch.Tensor  #: int64
    layout: TileLayout
    source_t: torch.Tensor  #: int64; packed token whose hidden state predicts the target
    target_t: torch.Tensor  #: int64 token ids
    behaviour_t: torch.Tensor  #: float32 log-probabilities under the policy that generated
    temperature_t: torch.Tensor  #: float32
    top_p_t: torch.Tensor  #: float32
    sequences: Sequences  #: one a sample, in the order of `samples`
    expected_b: torch.Tensor  #: float32, see Sample.expected
    advantage_t: torch.Tensor | None  #: float32, like the following: None where not every sample has it
    proximal_t: torch.Tensor | None
    reference_t: torch.Tensor | None
    value_t: torch.Tensor | None
    return_t: torch.Tensor | None
    samples: tuple[Sample, ...]
    nucleus: bool  #: whether any top_p is below 1; known here so that nobody has to ask the device
    team: Team | None = None  #: the ranks that share these tokens out

    @property
    def targets(self) -> int:
        """t."""
        return self.target_t.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on `device`."""
        moved = {name: x.to(device) for name in _TENSORS if (x := getattr(self, name)) is not None}
        sequences = Sequences(
            of_token_t=self.sequences.of_token_t.to(device), lengths_b=self.sequences.lengths_b.to(device)
        )
        return replace(self, layout=self.layout.to(device), sequences=sequences, **moved)


COLUMNS = ("advantage_t", "proximal_t", "reference_t", "value_t", "return_t")
_TENSORS = (
    "tokens_n", "positions_n", "source_t", "target_t", "behaviour_t", "temperature_t", "top_p_t", "expected_b",
    *COLUMNS,
)  # fmt: skip


def on_host(parts_t: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
    """What was computed of each micro-batch, fetched at once: the device is waited for once, not for each."""
    if not parts_t:
        return []
    return np.split(torch.cat(list(parts_t)).cpu().numpy(), np.cumsum([len(part_t) for part_t in parts_t])[:-1])


def pack(samples: Sequence[Sample], tokens_per_microbatch: int) -> list[MicroBatch]:
    """Balanced micro-batches of at most `tokens_per_microbatch` tokens; deterministic in the order of `samples`.

    A trajectory is never cut: one longer than the limit has a micro-batch of its own. A group is split, its prompt
    repeated, only where it must be. Samples without a trained token are left out.
    """
    pieces = [
        piece
        for group in _by_prompt([sample for sample in samples if sample.targets])
        for piece in _split(group, tokens_per_microbatch)
    ]
    return [_microbatch(bin_) for bin_ in _balance(pieces, tokens_per_microbatch)]


def idle() -> MicroBatch:
    """A micro-batch without a target: its gradient is 0. For a rank that has nothing left where others go on."""
    trajectory = Trajectory(
        group_id=0,
        member=0,
        prompt_tokens=np.zeros(1, np.int32),
        tokens=np.zeros(2, np.int32),
        logprobs=np.zeros(2, np.float32),
        loss_mask=np.zeros(2, np.bool_),
        temperature=1.0,
        top_p=1.0,
        reward=0.0,
        spans=(VersionSpan(start=0, version=Version(0, 0)),),
    )
    nothing: dict[str, Any] = dict.fromkeys(COLUMNS, np.zeros(0, np.float32))
    return _microbatch([[Sample(trajectory=trajectory, **nothing)]])


def packed_tokens(group: Sequence[Sample]) -> int:
    """Tokens that a piece (members of one group) takes in a micro-batch."""
    return len(group[0].trajectory.prompt_tokens) + sum(_reply_tokens(sample) for sample in group)


def _reply_tokens(sample: Sample) -> int:
    return len(sample.trajectory.tokens) - 1


def _by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Neighbours with the same group and the same prompt, together."""
    groups: dict[tuple[int, bytes], list[Sample]] = {}
    for sample in samples:
        trajectory = sample.trajectory
        groups.setdefault((trajectory.group_id, trajectory.prompt_tokens.tobytes()), []).append(sample)
    return list(groups.values())


def _split(group: list[Sample], limit: int) -> Iterator[list[Sample]]:
    piece: list[Sample] = []
    for sample in group:
        if piece and packed_tokens([*piece, sample]) > limit:
            yield piece
            piece = []
        piece.append(sample)
    yield piece


def _balance(pieces: list[list[Sample]], limit: int) -> list[list[list[Sample]]]:
    """The fewest bins found: longest first, each into the emptiest bin that has room."""
    sizes = [packed_tokens(piece) for piece in pieces]
    bins: list[list[int]] = [[] for _ in range(-(-sum(sizes) // limit))]
    filled = [0] * len(bins)
    for index in sorted(range(len(pieces)), key=lambda i: (-sizes[i], i)):
        best = min(range(len(bins)), key=lambda b: (filled[b], b))
        if filled[best] and filled[best] + sizes[index] > limit:
            best = len(bins)
            bins.append([])
            filled.append(0)
        bins[best].append(index)
        filled[best] += sizes[index]
    return [[pieces[index] for index in sorted(bin_)] for bin_ in bins if bin_]


def _microbatch(pieces: list[list[Sample]]) -> MicroBatch:
    samples = tuple(sample for piece in pieces for sample in piece)
    prompt_starts, reply_starts = _starts(pieces)
    targets = [np.flatnonzero(sample.trajectory.loss_mask) for sample in samples]
    counts = [len(positions) for positions in targets]
    prompt_ends = [
        start + len(piece[0].trajectory.prompt_tokens) - 1
        for start, piece in zip(prompt_starts, pieces, strict=True)
        for _ in piece
    ]
    sources = [
        np.where(positions == 0, end, start + positions - 1)
        for positions, end, start in zip(targets, prompt_ends, reply_starts, strict=True)
    ]

    def each_target(values: Sequence[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, np.float32), counts))

    def of_targets(arrays: Sequence[NDArray[np.generic]], dtype: type) -> torch.Tensor:
        chosen = [array[positions] for array, positions in zip(arrays, targets, strict=True)]
        return torch.from_numpy(np.concatenate(chosen).astype(dtype))

    columns: dict[str, Any] = {name: _column([getattr(sample, name) for sample in samples]) for name in COLUMNS}
    return MicroBatch(
        tokens_n=torch.from_numpy(np.concatenate(list(_token_runs(pieces))).astype(np.int64)),
        positions_n=torch.from_numpy(np.concatenate(list(_position_runs(pieces)))),
        layout=_layout(pieces, prompt_starts, reply_starts),
        source_t=torch.from_numpy(np.concatenate(sources).astype(np.int64)),
        target_t=of_targets([sample.trajectory.tokens for sample in samples], np.int64),
        behaviour_t=of_targets([sample.trajectory.logprobs for sample in samples], np.float32),
        temperature_t=each_target([sample.trajectory.temperature for sample in samples]),
        top_p_t=each_target([sample.trajectory.top_p for sample in samples]),
        sequences=Sequences(
            of_token_t=torch.from_numpy(np.repeat(np.arange(len(samples)), counts)),
            lengths_b=torch.tensor(counts, dtype=torch.float32),
        ),
        expected_b=torch.tensor([sample.expected for sample in samples], dtype=torch.float32),
        samples=samples,
        nucleus=any(sample.trajectory.top_p < 1 for sample in samples),
        **columns,
    )


def _column(parts: list[Floats32 | None]) -> torch.Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.from_numpy(np.concatenate(given)) if len(given) == len(parts) else None


def _starts(pieces: list[list[Sample]]) -> tuple[list[int], list[int]]:
    """First packed token of each prompt and of each reply."""
    prompt_starts, reply_starts, at = [], [], 0
    for piece in pieces:
        prompt_starts.append(at)
        at += len(piece[0].trajectory.prompt_tokens)
        for sample in piece:
            reply_starts.append(at)
            at += _reply_tokens(sample)
    return prompt_starts, reply_starts


def _token_runs(pieces: list[list[Sample]]) -> Iterator[NDArray[np.int32]]:
    for piece in pieces:
        yield piece[0].trajectory.prompt_tokens
        for sample in piece:
            yield sample.trajectory.tokens[:-1]


def _position_runs(pieces: list[list[Sample]]) -> Iterator[Ints]:
    for piece in pieces:
        prompt = len(piece[0].trajectory.prompt_tokens)
        yield np.arange(prompt)
        for sample in piece:
            yield np.arange(prompt, prompt + _reply_tokens(sample))


def _layout(pieces: list[list[Sample]], prompt_starts: list[int], reply_starts: list[int]) -> TileLayout:
    prompts = np.asarray([len(piece[0].trajectory.prompt_tokens) for piece in pieces])
    replies = np.asarray([_reply_tokens(sample) for piece in pieces for sample in piece])
    piece_of = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    tiles: list[PromptTile] = []
    tokens: list[Ints] = []  # packed token of each row, -1 for padding
    for members in _similar(prompts):
        width = int(prompts[members].max())
        tokens.append(_right_aligned(np.asarray(prompt_starts)[members], prompts[members], width))
        mine = np.flatnonzero(np.isin(piece_of, members) & (replies > 0))
        reply_tiles = []
        for chosen in _similar(replies[mine]):
            which = mine[chosen]
            longest = int(replies[which].max())
            tokens.append(_left_aligned(np.asarray(reply_starts)[which], replies[which], longest))
            own = piece_of[which]
            reply_tiles.append(_reply_tile(np.searchsorted(members, own), prompts[own], width, longest))
        mask = _prompt_mask(prompts[members], width)
        tiles.append(PromptTile(prompts=len(members), width=width, mask_g1pp=mask, replies=tuple(reply_tiles)))
    return _rows(tuple(tiles), np.concatenate([rows.ravel() for rows in tokens]))


def _rows(tiles: tuple[PromptTile, ...], token_r: Ints) -> TileLayout:
    padding = token_r < 0
    row_n = np.empty(np.count_nonzero(~padding), np.int64)
    row_n[token_r[~padding]] = np.flatnonzero(~padding)
    return TileLayout(
        tiles=tiles,
        token_r=torch.from_numpy(np.where(padding, 0, token_r)),
        row_n=torch.from_numpy(row_n),
        padding=torch.from_numpy(np.flatnonzero(padding)),
    )


def _similar(lengths: Ints) -> list[Ints]:
    """Indices in tiles of similar length, each in rising order."""
    tiles: list[list[int]] = []
    for index in np.argsort(-lengths, kind="stable"):
        if not tiles or lengths[index] < TILE_RATIO * lengths[tiles[-1][0]]:
            tiles.append([])
        tiles[-1].append(int(index))
    return [np.sort(np.asarray(tile)) for tile in tiles]


def _left_aligned(starts: Ints, lengths: Ints, width: int) -> Ints:
    column = np.arange(width)
    return np.where(column < lengths[:, None], starts[:, None] + column, -1)


def _right_aligned(starts: Ints, lengths: Ints, width: int) -> Ints:
    column = np.arange(width) - (width - lengths[:, None])
    return np.where(column >= 0, starts[:, None] + column, -1)


def _prompt_mask(lengths: Ints, width: int) -> torch.Tensor:
    column = np.arange(width)
    causal = column[:, None] >= column[None, :]
    real = column[None, :] >= width - lengths[:, None]
    # A padding row sees itself: a row without any key would be 0/0, and NaN does not stay in its row in backward.
    mask = (causal & real[:, None, :]) | np.eye(width, dtype=bool)
    return torch.from_numpy(mask[:, None])


def _reply_tile(prompt_s: Ints, prompt_lengths: Ints, width: int, longest: int) -> ReplyTile:
    column = np.arange(longest)
    sees_prompt = np.arange(width)[None, :] >= width - prompt_lengths[:, None]
    causal = column[:, None] >= column[None, :]
    shape = (len(prompt_s), longest)
    mask = np.concatenate(
        [np.broadcast_to(sees_prompt[:, None, :], (*shape, width)), np.broadcast_to(causal, (*shape, longest))], axis=2
    )
    return ReplyTile(prompt_s=torch.from_numpy(prompt_s), width=longest, mask_s1qk=torch.from_numpy(mask[:, None]))


def _tile_to(tile: PromptTile, device: torch.device) -> PromptTile:
    replies = tuple(
        ReplyTile(prompt_s=r.prompt_s.to(device), width=r.width, mask_s1qk=r.mask_s1qk.to(device)) for r in tile.replies
    )
    return PromptTile(prompts=tile.prompts, width=tile.width, mask_g1pp=tile.mask_g1pp.to(device), replies=replies)
