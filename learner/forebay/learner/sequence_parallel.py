"""Long sequences over several ranks (DeepSpeed-Ulysses, arXiv 2309.14509): each has a slice of a micro-batch's tokens,
and in attention, instead, a part of the heads of all tokens.

The ranks of such a team hold the same micro-batches. Each computes the hidden states of its slice and what is wanted
at the targets in it; then all know it at every target, and the loss is the same on each. The gradient of each rank is
that of its slice: as everywhere, the ranks' gradients are summed.

Shape suffixes: n packed tokens, m packed tokens of a slice, t targets, o targets of a slice, h heads, d head size,
e hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from forebay.errors import UsageError
from forebay.learner.packing import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The ranks that share a sequence, as one of them sees them. All calls are collective."""

    rank: int
    count: int
    group: Any  #: of torch.distributed, on the device of the weights

    def slice_of(self, tokens: int) -> slice:
        """This rank's: equal ones, so the last may lie partly beyond the end."""
        size = -(-tokens // self.count)
        return slice(self.rank * size, (self.rank + 1) * size)

    def part(self, x_n: torch.Tensor) -> torch.Tensor:
        """[m], filled up with zeros."""
        own = self.slice_of(len(x_n))
        part = x_n[own]
        return torch.nn.functional.pad(part, (0, own.stop - own.start - len(part)))

    def heads(self, x_mhd: torch.Tensor, tokens: int) -> torch.Tensor:
        """From a slice of all heads to the whole of some: [m, h, d] to [n, h / count, d]."""
        return self._exchanged(x_mhd, scatter=2, gather=1)[:tokens]

    def tokens(self, x_nhd: torch.Tensor) -> torch.Tensor:
        """And back."""
        beyond = -len(x_nhd) % self.count
        return self._exchanged(torch.nn.functional.pad(x_nhd, (0, 0, 0, 0, 0, beyond)), scatter=1, gather=2)

    def _exchanged(self, x: torch.Tensor, *, scatter: int, gather: int) -> torch.Tensor:
        from deepspeed.sequence.layer import _SeqAllToAll

        return _SeqAllToAll.apply(self.group, x[None], scatter, gather, 0)[0]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTargets:
    """Those of a micro-batch's targets whose hidden states this rank has: all, where there is no team."""

    batch: MicroBatch
    hidden_oe: torch.Tensor
    index_o: torch.Tensor | None = None

    def of(self, x_t: torch.Tensor) -> torch.Tensor:
        """[o]."""
        return x_t if self.index_o is None else x_t.index_select(0, self.index_o)

    def everywhere(self, x_o: torch.Tensor) -> torch.Tensor:
        """[t], from what every rank has at its own."""
        if self.index_o is None or self.batch.team is None:
            return x_o
        mine_t = x_o.new_zeros(self.batch.targets).index_copy(0, self.index_o, x_o)
        return _Sum.apply(mine_t, self.batch.team)  # type: ignore[no-untyped-call, no-any-return]


def hidden_at_targets(body: torch.nn.Module, batch: MicroBatch) -> OwnTargets:
    """The last hidden states of a Hugging Face model without its head, at the tokens that predict the targets."""
    team, tokens_n, positions_n = batch.team, batch.tokens_n, batch.positions_n
    if team is not None:
        tokens_n, positions_n = team.part(tokens_n), team.part(positions_n)
    hidden_1me = body(
        input_ids=tokens_n[None],
        position_ids=positions_n[None],
        use_cache=False,
        layout=batch.layout,
        team=team,
    ).last_hidden_state
    if team is None:
        return OwnTargets(batch=batch, hidden_oe=hidden_1me[0].index_select(0, batch.source_t))
    own = team.slice_of(len(batch.tokens_n))
    index_o = torch.nonzero((batch.source_t >= own.start) & (batch.source_t < own.stop))[:, 0]
    source_o = batch.source_t.index_select(0, index_o) - own.start
    return OwnTargets(batch=batch, hidden_oe=hidden_1me[0].index_select(0, source_o), index_o=index_o)


def check_heads(model: PreTrainedModel, count: int) -> None:
    """Raises UsageError when a team of `count` cannot share out the model's heads (key heads stay with their query
    heads)."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % count:
        raise UsageError(
            f"learner.sequence_parallel is {count}; expected a divisor of the number of key heads of the model, {heads}"
        )


class _Sum(torch.autograd.Function):
    """Of what the ranks have, each at its own targets; the gradient of each is at its own."""

    @staticmethod
    def forward(ctx: Any, x_t: torch.Tensor, team: Team) -> torch.Tensor:
        total_t = x_t.contiguous().clone()
        torch.distributed.all_reduce(total_t, group=team.group)
        return total_t

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
