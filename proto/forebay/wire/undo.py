"""Applying blocks so that it can be taken back: whoever keeps one copy of the weights must be able to return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.wire import block
from forebay.wire.block import REVERSIBLE, Opened
from forebay.wire.dtype import Bits
from forebay.wire.fingerprint import Sums
from forebay.wire.host_state import HostState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A block of a payload and the elements that it is for."""

    name: str
    dtype: str
    target: Bits
    first: int  #: byte in its tensor
    opened: Opened


class Undo:
    """What was applied to `state`, and the way back.

    Most blocks lead back by themselves: their steps are taken the other way. Of those that do not (PLANES, CLASSES) the
    old elements are kept, so after an anchor this holds a second copy of the model. Without `keep` nothing is held.
    """

    def __init__(self, state: HostState, *, keep: bool) -> None:
        self._state, self._keep = state, keep and not state.damaged
        self._digests = state.known_digests() if self._keep else {}
        self._done: list[tuple[Piece, Bits | None]] = []

    def apply_all(self, pieces: Sequence[Piece]) -> list[tuple[str, Sums]]:
        """Names of tensors and how their fingerprints changed. Several threads may call it. Raises WireError."""
        return [(piece.name, self._apply(piece)) for piece in pieces]

    def roll_back(self) -> bool:
        """Put the state back to what it was; False when nothing was kept."""
        if not self._keep:
            return False
        while self._done:
            piece, old = self._done.pop()
            if old is not None:
                piece.target[:] = old
            else:
                block.apply_block(piece.target, piece.opened, piece.dtype, first=piece.first, backwards=True)
        self._state.mark_sound(self._digests)
        return True

    def _apply(self, piece: Piece) -> Sums:
        reversible = piece.opened.kind in REVERSIBLE
        if self._keep and not reversible:
            self._done.append((piece, piece.target.copy()))
        change = block.apply_block(piece.target, piece.opened, piece.dtype, first=piece.first)
        if self._keep and reversible:  # these are either applied whole or not at all
            self._done.append((piece, None))
        return change
