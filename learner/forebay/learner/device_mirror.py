"""The weights as they last left the learner, kept where they are trained: only what has changed since goes to the host.

A copy to the host moves every weight over the bus, 2 bytes each in bfloat16; of an update that changes 1 %, this moves
6 bytes for one weight in a hundred. It costs a copy of the weights on the device. Every difference is taken between bit
patterns, so NaN payloads and the sign of zero arrive, too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from forebay.learner.snapshot import DTYPES, host_tensors, whole_tensors
from forebay.wire.dtype import Bits
from forebay.wire.weights import HostState

#: An element's position has so many bytes: beyond 2**31 elements in one tensor, eight.
_SHORT, _LONG = torch.int32, torch.int64
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What became of a tensor: bits at positions, or at all of them where most have changed."""

    bits: Bits
    positions: NDArray[Any] | None  #: int32, or int64 in tensors of 2**31 elements and more

    @property
    def nbytes(self) -> int:
        """What went over the bus."""
        return self.bits.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def apply(self, to: Bits) -> None:
        """Make it of a tensor's elements in host memory."""
        to[slice(None) if self.positions is None else self.positions] = self.bits.view(to.dtype)


class DeviceMirror:
    """Fills host states that each were filled before with what has changed since. One thread; collective calls."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._mirror: dict[str, torch.Tensor] = {}  #: integers as wide as the published elements
        self._changes: deque[dict[str, Change]] = deque()
        self._first = 0  #: which fill the first of `_changes` belongs to
        self._filled: WeakKeyDictionary[HostState, int] = WeakKeyDictionary()
        self.moved_bytes = 0  #: over the bus, since the start

    def fill(self, state: HostState) -> None:
        """What `copy_to_host` would do, for states that all have room for the same tensors."""
        self._changes.append(self._changed(state))
        last = self._first + len(self._changes)
        since = self._filled.get(state, -1)
        if since < self._first:
            self._copy_all(state)
        else:
            for changes in islice(self._changes, since - self._first, None):
                for name, change in changes.items():
                    change.apply(state.open_for_update(name))
        self._filled[state] = last
        self._forget(state.model_bytes)

    @torch.no_grad()
    def _changed(self, state: HostState) -> dict[str, Change]:
        """Since the last call; the mirror is then the model."""
        dtypes = {spelled: dtype for dtype, spelled in DTYPES.items()}
        wanted = {slot["name"]: dtypes[slot["dtype"]] for slot in state.layout}
        found: dict[str, Change] = {}
        for some in whole_tensors(self._model):
            for name in some.keys() & wanted.keys():
                bits = some[name].detach().to(wanted[name]).contiguous().view(_BITS[wanted[name]]).flatten()
                change = self._difference(name, bits)
                if change is not None:
                    found[name] = change
        self.moved_bytes += sum(change.nbytes for change in found.values())
        return found

    def _difference(self, name: str, bits: torch.Tensor) -> Change | None:
        known = self._mirror.get(name)
        if known is None:
            self._mirror[name] = bits.clone()
            return None  # no state has been filled yet
        where = torch.nonzero(bits != known).flatten()
        if not where.numel():
            return None
        known.copy_(bits)
        where = where.to(_SHORT if bits.numel() <= torch.iinfo(_SHORT).max else _LONG)
        if where.numel() * (where.element_size() + bits.element_size()) >= bits.numel() * bits.element_size():
            return Change(bits=_on_host(bits), positions=None)
        return Change(bits=_on_host(bits.index_select(0, where)), positions=_on_host(where))

    def _copy_all(self, state: HostState) -> None:
        for name, room in host_tensors(state).items():
            room.copy_(self._mirror[name].view(room.dtype).view(room.shape))
        self.moved_bytes += state.model_bytes

    def _forget(self, most_bytes: int) -> None:
        """Changes that every state has, and the oldest ones where a state lags so far that a copy is cheaper."""
        oldest = min(self._filled.values())
        while self._changes and (self._first < oldest or _size(self._changes) > most_bytes):
            self._changes.popleft()
            self._first += 1


def _size(changes: deque[dict[str, Change]]) -> int:
    return sum(change.nbytes for of_fill in changes for change in of_fill.values())


def _on_host(x: torch.Tensor) -> Bits:
    host: Bits = x.cpu().numpy()
    return host
