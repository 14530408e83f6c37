"""Attention over packed tokens: scattered into small padded tiles, where sequences cannot see each other, and back.

Registered in transformers as the attention implementation `forebay_packed`; the model itself stays as it is.

Shape suffixes: n packed tokens, r rows of all tiles, b sequences of a tile, q queries, k keys, h query heads,
j key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forebay.learner.packing import PromptTile, TileLayout
from forebay.learner.sequence_parallel import Team

ATTENTION = "forebay_packed"
NARROW = (torch.bfloat16, torch.float16)


def register() -> None:
    """Make `attn_implementation="forebay_packed"` known to transformers. Harmless when repeated."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query_1hnd: torch.Tensor,
    key_1jnd: torch.Tensor,
    value_1jnd: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: TileLayout,
    team: Team | None = None,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """The output [1, n, h, d] of causal attention within each sequence of `layout`, and no attention weights. With a
    `team`, of what goes in and comes out n are this rank's slice."""
    del module, attention_mask, unused
    query, key, value = (x[0].transpose(0, 1) for x in (query_1hnd, key_1jnd, value_1jnd))
    if team is None:
        return _attend_all(query, key, value, layout, scaling)[None].to(query.dtype), None
    query, key, value = (team.heads(x_mhd, layout.row_n.numel()) for x_mhd in (query, key, value))
    return team.tokens(_attend_all(query, key, value, layout, scaling).to(query.dtype))[None], None


def _attend_all(
    query_nhd: torch.Tensor, key_njd: torch.Tensor, value_njd: torch.Tensor, layout: TileLayout, scaling: float | None
) -> torch.Tensor:
    # Split, not sliced: the gradient of a split is one concatenation, that of each slice a full tensor of zeros.
    sizes = [rows * width for tile in layout.tiles for rows, width in _shapes(tile)]
    queries, keys, values = (iter(torch.split(_to_tiles(x, layout), sizes)) for x in (query_nhd, key_njd, value_njd))
    parts = [part for tile in layout.tiles for part in _attend_tile(queries, keys, values, tile, scaling)]
    output_rhd = torch.cat(parts) if len(parts) > 1 else parts[0]
    return _FromTiles.apply(output_rhd, layout)  # type: ignore[no-untyped-call, no-any-return]


def _shapes(tile: PromptTile) -> list[tuple[int, int]]:
    """Sequences and width of the prompts, then of each reply tile."""
    return [(tile.prompts, tile.width), *((reply.prompt_s.numel(), reply.width) for reply in tile.replies)]


def _attend_tile(
    queries: Iterator[torch.Tensor],
    keys: Iterator[torch.Tensor],
    values: Iterator[torch.Tensor],
    tile: PromptTile,
    scaling: float | None,
) -> Iterator[torch.Tensor]:
    """Outputs [rows, h, d] of the prompts and of each reply tile, whose rows the iterators give next."""
    prompts, *replies = _shapes(tile)
    key_gpjd, value_gpjd = _rows(next(keys), prompts), _rows(next(values), prompts)
    yield _attend(_rows(next(queries), prompts), key_gpjd, value_gpjd, tile.mask_g1pp, scaling)
    for reply, shape in zip(tile.replies, replies, strict=True):
        key_bkjd, value_bkjd = (
            torch.cat([prompt_gpjd.index_select(0, reply.prompt_s), _rows(next(own), shape)], dim=1)
            for prompt_gpjd, own in ((key_gpjd, keys), (value_gpjd, values))
        )
        yield _attend(_rows(next(queries), shape), key_bkjd, value_bkjd, reply.mask_s1qk, scaling)


def _rows(x_rhd: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return x_rhd.view(*shape, *x_rhd.shape[1:])


def _attend(
    query_bqhd: torch.Tensor,
    key_bkjd: torch.Tensor,
    value_bkjd: torch.Tensor,
    mask_b1qk: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Output [b * q, h, d]. Query heads that share a key head stand in one longer query, so keys are never repeated."""
    b, q, h, d = query_bqhd.shape
    j = key_bkjd.shape[2]
    folded = query_bqhd.view(b, q, j, h // j, d).permute(0, 2, 3, 1, 4).reshape(b, j, (h // j) * q, d)
    output = scaled_dot_product_attention(
        folded,
        key_bkjd.transpose(1, 2),
        value_bkjd.transpose(1, 2),
        attn_mask=mask_b1qk.repeat(1, 1, h // j, 1),
        scale=scaling,
    )
    return output.view(b, h, q, d).transpose(1, 2).reshape(b * q, h, d)


def _to_tiles(x_nhd: torch.Tensor, layout: TileLayout) -> torch.Tensor:
    if x_nhd.device.type == "cpu" and x_nhd.dtype in NARROW:
        x_nhd = x_nhd.float()  # torch's CPU kernel takes four times as long in bfloat16, most of it backward
    return _ToTiles.apply(x_nhd, layout)  # type: ignore[no-untyped-call, no-any-return]


class _ToTiles(torch.autograd.Function):
    """[n, h, d] -> [r, h, d]. Every token lies in exactly one row, so the gradient is a gather too: fast, and
    deterministic where a scatter-add is neither."""

    @staticmethod
    def forward(ctx: Any, x_nhd: torch.Tensor, layout: TileLayout) -> torch.Tensor:
        ctx.layout = layout
        return x_nhd.index_select(0, layout.token_r)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].index_select(0, ctx.layout.row_n), None


class _FromTiles(torch.autograd.Function):
    """[r, h, d] -> [n, h, d]; padding rows get no gradient."""

    @staticmethod
    def forward(ctx: Any, x_rhd: torch.Tensor, layout: TileLayout) -> torch.Tensor:
        ctx.layout = layout
        return x_rhd.index_select(0, layout.row_n)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        spread = grads[0].index_select(0, ctx.layout.token_r)
        return spread.index_fill_(0, ctx.layout.padding, 0), None
