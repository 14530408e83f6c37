"""The columns of a frame: its groups in the form that compresses well, and back.

Prompts are kept once a group; tokens and log-probabilities without those that a member shares with the one before it;
loss masks as run lengths; versions as spans; repeated texts once. What the frame's header says of the groups is not
said again: the columns need it to be read. All of it is lossless, but for log-probabilities in the form "compact".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.wire import logprobs, planes, run_lengths, sharing, text_codes, token_ids
from forebay.wire.errors import WireError
from forebay.wire.flat_groups import FLOATS, TEXTS, Counts, FlatGroups, cut
from forebay.wire.storage import Columns
from forebay.wire.words import WordReader, as_words

MAX_TOKENS = 1 << 22  #: generated tokens of a frame, and prompt tokens: bounds what a reader allocates

_ROWS = 7 + len(TEXTS)  #: words of a member, see `_words`
_U8 = np.dtype("<u8")


def to_columns(flat: FlatGroups, form: str) -> Columns:
    """Columns of checked groups. `form` is that of the log-probabilities. Raises WireError."""
    shared = sharing.common(flat.tokens, flat.lengths, flat.sizes)
    alike = sharing.common(flat.logprobs.view(np.uint32), flat.lengths, flat.sizes, at_most=shared)
    ids = np.concatenate([flat.prompts, sharing.rest(flat.tokens, flat.lengths, shared)])
    codes, texts = zip(*map(text_codes.encode, (*flat.texts, flat.part_names)), strict=True)
    return Columns(
        words=as_words(_words(flat, shared, alike, codes)),
        floats=_float_streams(np.concatenate([flat.floats.reshape(-1), flat.part_values])),
        texts=[text for own in texts for text in own],
        tokens=token_ids.encode(ids.view(np.uint32)),
        logprobs=logprobs.encode(sharing.rest(flat.logprobs, flat.lengths, alike), form),
    )


def _words(flat: FlatGroups, shared: Counts, alike: Counts, codes: Any) -> list[NDArray[Any]]:
    """All the small whole numbers, in the order in which `from_columns` can know how many there are."""
    run_counts, runs = run_lengths.encode(flat.loss_mask, flat.lengths)
    rows = (flat.members, flat.lengths, shared, alike, run_counts, flat.span_counts, flat.part_counts)
    spans = (flat.span_starts, flat.span_incarnations, flat.span_steps)
    return [*rows, *codes[:-1], *spans, runs, codes[-1]]


def from_columns(columns: Columns, table: NDArray[np.uint64], form: str) -> FlatGroups:
    """The groups that the header describes by `table` [g, 9], checked. Raises WireError."""
    sizes, prompt_lengths = table[:, 2].astype(np.int64), table[:, 3].astype(np.int64)
    words = WordReader(columns.words[0])
    members, lengths, shared, alike, run_counts, span_counts, part_counts, *codes = words.rows(_ROWS, int(sizes.sum()))
    _check_counts(lengths, shared, alike, sizes, int(prompt_lengths.sum()))
    spans = words.rows(3, int(span_counts.sum()))
    runs = words.rows(1, int(run_counts.sum()))[0]
    part_codes = words.rows(1, int(part_counts.sum()))[0]
    words.close()
    prompts, tokens = _read_tokens(columns, prompt_lengths, lengths, shared)
    floats = _read_floats(columns.floats[0], len(FLOATS) * len(members) + len(part_codes))
    *texts, part_names = _read_texts(columns.texts, [*codes, part_codes])
    flat = FlatGroups(
        group_ids=table[:, 0],
        attempts=table[:, 1].astype(np.uint32),
        sizes=sizes,
        prompt_lengths=prompt_lengths,
        prompts=prompts,
        members=members.astype(np.uint32),
        lengths=lengths,
        tokens=tokens,
        loss_mask=run_lengths.decode(run_counts, runs, lengths),
        logprobs=_read_logprobs(columns, lengths, alike, form),
        span_counts=span_counts,
        **_named_spans(spans),
        floats=floats[: len(FLOATS) * len(members)].reshape(len(FLOATS), -1),
        texts=texts,
        part_counts=part_counts,
        part_names=part_names,
        part_values=floats[len(FLOATS) * len(members) :],
    )
    flat.check()
    return flat


def _check_counts(lengths: Counts, shared: Counts, alike: Counts, sizes: Counts, prompt_tokens: int) -> None:
    if sizes.min(initial=1) < 1 or lengths.min(initial=1) < 1:
        raise WireError("a group without members, or a member without tokens")
    if max(int(lengths.sum()), prompt_tokens) > MAX_TOKENS:
        raise WireError(f"more than {MAX_TOKENS} tokens")
    sharing.check(shared, lengths, sizes)
    sharing.check(alike, lengths, sizes)


def _named_spans(spans: NDArray[np.int64]) -> dict[str, Any]:
    starts, incarnations, steps = spans.astype(np.uint32)
    return {"span_starts": starts, "span_incarnations": incarnations, "span_steps": steps}


def _read_tokens(
    columns: Columns, prompt_lengths: Counts, lengths: Counts, shared: Counts
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    prompt_tokens = int(prompt_lengths.sum())
    ids = token_ids.decode(columns.tokens[0], prompt_tokens + int((lengths - shared).sum())).view(np.int32)
    return ids[:prompt_tokens], sharing.whole(ids[prompt_tokens:], lengths, shared)


def _read_logprobs(columns: Columns, lengths: Counts, alike: Counts, form: str) -> NDArray[np.float32]:
    stored = logprobs.decode(columns.logprobs[0], int((lengths - alike).sum()), form)
    return sharing.whole(stored, lengths, alike)


def _read_texts(texts: Any, codes: list[Counts]) -> list[list[str]]:
    counts = np.array([text_codes.distinct(own) for own in codes])
    if len(texts) != counts.sum():
        raise WireError(f"{len(texts)} texts, expected {counts.sum()}")
    own_texts = cut(texts.to_pylist(), counts)
    return [text_codes.decode(own, distinct) for own, distinct in zip(codes, own_texts, strict=True)]


# Floats: the bits' differences from one member to the next, zig-zag, in byte planes


def _float_streams(values: NDArray[np.float64]) -> list[NDArray[np.uint8]]:
    steps = np.diff(values.view(_U8), prepend=_U8.type(0)).view(np.int64)
    return planes.narrow(((steps << 1) ^ (steps >> 63)).view(_U8))


def _read_floats(data: NDArray[np.uint8], count: int) -> NDArray[np.float64]:
    folded = planes.widen(data, count, _U8)
    steps = (folded >> np.uint64(1)) ^ (np.uint64(0) - (folded & np.uint64(1)))
    return np.cumsum(steps, dtype=_U8).view(np.float64)
