"""From one or two host states to a payload: blocks are encoded side by side and written in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from forebay.wire import block
from forebay.wire.block import BLOCK_BYTES, Block, Kind
from forebay.wire.bytes_like import BytesLike
from forebay.wire.chunker import Chunker
from forebay.wire.dtype import Bits
from forebay.wire.fingerprint import NOTHING, packed, plus, total, unpacked
from forebay.wire.host_state import HostState, Slot, blocks_of
from forebay.wire.parallel import batched, in_order
from forebay.wire.v1 import weights_pb2

_NAMES = {Kind.GAPS: "gap-ulp", Kind.BITMASK: "bitmask-ulp", Kind.CLASSES: "class-ulp", Kind.XOR: "xor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A version ready to be stored: its manifest, and the chunks that the manifest names, by digest."""

    manifest: weights_pb2.Manifest
    chunks: dict[bytes, bytes]

    def payload(self) -> bytes:
        """The chunks in payload order, as `apply` takes them."""
        return b"".join(self.chunks[chunk.digest] for chunk in self.manifest.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A block as it stands in a payload."""

    kind: Kind
    changed: int
    data: BytesLike


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """What one block is made of."""

    old: Bits | None
    new: Bits
    dtype: str
    first: int  #: byte in its tensor


def encode(base: HostState | None, new: HostState, manifest: weights_pb2.Manifest, *, classes: bool) -> Encoded:
    """Fill in `manifest`, whose head is done, and make its chunks. `new` learns its tensors' digests on the way."""
    payload, digests = Chunker(), base.tensor_digests() if base else {}
    pieces = (piece for slot in new.layout for piece in _pieces(base, new, slot))
    batches = batched(pieces, lambda piece: piece.new.nbytes)
    blocks = chain.from_iterable(in_order(lambda batch: [_encoded(piece, classes) for piece in batch], batches))
    for slot in new.layout:
        own = list(islice(blocks, -(-slot["nbytes"] // BLOCK_BYTES)))
        before = unpacked(digests[slot["name"]]) if base else NOTHING
        digests[slot["name"]] = packed(plus(before, total(one.change for one in own)))
        new.learn_digest(slot["name"], digests[slot["name"]])
        if base is None or any(one.changed for one in own):
            entry = manifest.tensors.add(name=slot["name"], dtype=slot["dtype"], shape=slot["shape"])
            entry.digest = digests[slot["name"]]
            write_blocks(entry, [Written(kind=one.kind, changed=one.changed, data=one.data) for one in own], payload)
    manifest.digest = new.digest_with(digests)
    manifest.changed = sum(entry.changed for entry in manifest.tensors)
    manifest.chunks.extend(payload.close())
    manifest.payload_bytes = payload.written_bytes
    return Encoded(manifest=manifest, chunks=payload.chunks)


def _pieces(base: HostState | None, new: HostState, slot: Slot) -> Iterator[_Piece]:
    old = blocks_of(base.view_of(slot["name"]), BLOCK_BYTES) if base else iter(())
    first = 0
    for fresh in blocks_of(new.view_of(slot["name"]), BLOCK_BYTES):
        yield _Piece(old=next(old, None), new=fresh, dtype=slot["dtype"], first=first)
        first += fresh.nbytes


def _encoded(piece: _Piece, classes: bool) -> Block:
    return block.encode(piece.old, piece.new, piece.dtype, first=piece.first, classes=classes)


def write_blocks(entry: weights_pb2.TensorEntry, blocks: Sequence[Written], payload: Chunker) -> None:
    """Append a tensor's blocks to the payload, and say in its entry where and what they are."""
    entry.offset = payload.written_bytes
    for one in blocks:
        payload.write(one.data)
    entry.bytes = payload.written_bytes - entry.offset
    entry.changed = sum(one.changed for one in blocks)
    entry.codec = _codec_name({one.kind for one in blocks})


def _codec_name(kinds: set[Kind]) -> str:
    """For people: what the tensor's blocks are coded as."""
    names = {_NAMES.get(kind, "planes") for kind in kinds - {Kind.SAME}}
    return names.pop() if len(names) == 1 else "mixed" if names else "planes"
