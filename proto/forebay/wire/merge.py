"""Several consecutive deltas as one, from their payloads alone: no weights are needed.

ULP steps add modulo 2^width, because the order of an element's bit patterns is a bijection (`forebay.wire.ulp`). So a
receiver that is many versions behind fetches each changed position once, and what moved there and back not at all.
Merging is associative in its effect: merged deltas merge.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from forebay.wire import block, ulp
from forebay.wire.block import BLOCK_BYTES, Kind, Opened
from forebay.wire.bytes_like import BytesLike, flat
from forebay.wire.chunker import Chunker
from forebay.wire.dtype import Bits, unit
from forebay.wire.encoder import Encoded
from forebay.wire.errors import CorruptWeights, WeightsError, WireError
from forebay.wire.host_state import TensorSpec
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version

_ADDS = frozenset({Kind.GAPS, Kind.BITMASK})  #: ULP steps at places that the payload names
_CODECS = {Kind.GAPS: "gap-ulp", Kind.PLANES: "planes"}


class CannotMerge(WeightsError):
    """Deltas whose forms need the base's values, or that do not follow one another. Use them one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A stored version, and how to read `nbytes` of its payload from `offset`. `read` may raise what it likes."""

    manifest: weights_pb2.Manifest
    read: Callable[[int, int], BytesLike]

    @classmethod
    def of(cls, encoded: Encoded) -> Delta:
        """One whose payload is in memory."""
        payload = memoryview(encoded.payload())
        return cls(manifest=encoded.manifest, read=lambda offset, nbytes: payload[offset : offset + nbytes])


def merge(chain: Sequence[Delta]) -> Encoded:
    """What leads from the base of the first of `chain` to the weights of the last, bit for bit.

    Memory: the merged payload, and one tensor's part of every payload. When the first is an anchor, so is the result.
    A manifest's `changed` counts the elements that are sent: of blocks that a later one replaced, all.
    Raises CannotMerge, CorruptWeights.
    """
    _check_chain([delta.manifest for delta in chain])
    first, last = chain[0].manifest, chain[-1].manifest
    merged = weights_pb2.Manifest(
        format=last.format,
        version=last.version,
        anchor=first.anchor,
        base_digest=first.base_digest,
        digest=last.digest,
        model_bytes=last.model_bytes,
        elements=last.elements,
    )
    if first.HasField("base"):
        merged.base.CopyFrom(first.base)
    payload = Chunker()
    merged.tensors.extend(_merged_tensors(chain, payload, keep_unchanged=first.anchor))
    merged.changed = sum(entry.changed for entry in merged.tensors)
    merged.chunks.extend(payload.close())
    merged.payload_bytes = payload.written_bytes
    return Encoded(manifest=merged, chunks=payload.chunks)


def _check_chain(manifests: Sequence[weights_pb2.Manifest]) -> None:
    if not manifests:
        raise CannotMerge("nothing to merge")
    for before, after in itertools.pairwise(manifests):
        names = f"{Version.from_proto(before.version)} and {Version.from_proto(after.version)}"
        if after.anchor or after.base_digest != before.digest:
            raise CannotMerge(f"versions {names} do not follow one another: the second is no delta to the first")
        if after.format != before.format:
            raise CannotMerge(f"versions {names} are written in formats {before.format} and {after.format}")


def _merged_tensors(
    chain: Sequence[Delta], payload: Chunker, *, keep_unchanged: bool
) -> Iterator[weights_pb2.TensorEntry]:
    tables = [{entry.name: entry for entry in delta.manifest.tensors} for delta in chain]
    for name in sorted(set[str]().union(*tables)):
        own = [(delta, table[name]) for delta, table in zip(chain, tables, strict=True) if name in table]
        newest = own[-1][1]
        _check_same(entry for _, entry in own)
        entry = weights_pb2.TensorEntry(
            name=name, dtype=newest.dtype, shape=newest.shape, digest=newest.digest, offset=payload.written_bytes
        )
        blocks = list(_merged_blocks(newest, [flat(delta.read(old.offset, old.bytes)) for delta, old in own]))
        if keep_unchanged or any(one.changed for one in blocks):
            yield _written(entry, blocks, payload)


def _check_same(entries: Iterable[weights_pb2.TensorEntry]) -> None:
    shapes = {(entry.name, entry.dtype, tuple(entry.shape)) for entry in entries}
    if len(shapes) > 1:
        raise CannotMerge(f"a tensor changed its type or shape on the way: {sorted(shapes)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    kind: Kind
    changed: int
    data: BytesLike


def _written(entry: weights_pb2.TensorEntry, blocks: Sequence[_Block], payload: Chunker) -> weights_pb2.TensorEntry:
    for one in blocks:
        payload.write(bytes(one.data))
    entry.bytes = payload.written_bytes - entry.offset
    entry.changed = sum(one.changed for one in blocks)
    names = {_CODECS.get(one.kind, "mixed") for one in blocks if one.kind is not Kind.SAME}
    entry.codec = names.pop() if len(names) == 1 else "mixed" if names else "planes"
    return entry


def _merged_blocks(entry: weights_pb2.TensorEntry, contents: list[memoryview]) -> Iterator[_Block]:
    """Block after block of one tensor, of which `contents` has each delta's bytes."""
    width = unit(entry.dtype)
    left = TensorSpec(name=entry.name, dtype=entry.dtype, shape=tuple(entry.shape)).nbytes // width.itemsize
    try:
        while left:
            chain = _Chain(dtype=entry.dtype, elements=min(left, BLOCK_BYTES // width.itemsize))
            for index, content in enumerate(contents):
                opened = block.open_block(content, chain.elements, width.itemsize)
                chain.add(opened, content[: opened.used])
                contents[index] = content[opened.used :]
            yield chain.merged()
            left -= chain.elements
    except WireError as error:
        raise CorruptWeights(f"tensor {entry.name}: {error}") from error
    if any(map(len, contents)):
        raise CorruptWeights(f"tensor {entry.name}: bytes are left over behind its last block")


@dataclass(slots=True, kw_only=True)
class _Chain:
    """The blocks of one place in consecutive deltas, unchanged ones left out, none before a PLANES block."""

    dtype: str
    elements: int
    opened: list[Opened] = field(default_factory=list)
    data: BytesLike = b""

    def add(self, opened: Opened, data: BytesLike) -> None:
        if opened.kind is Kind.PLANES:
            self.opened.clear()
        if opened.kind is Kind.SAME:
            return
        self.opened.append(opened)
        if len(self.opened) == 1:
            self.data = data

    def merged(self) -> _Block:
        """One block in the place of all. Raises CannotMerge, WireError."""
        kinds = [opened.kind for opened in self.opened]
        if not kinds:
            return _steps_block(np.zeros(self.elements, unit(self.dtype)))
        if len(kinds) == 1:
            return _Block(kind=kinds[0], changed=self.opened[0].changed, data=self.data)
        if kinds[0] is Kind.PLANES:
            return self._placed()
        if set(kinds) <= _ADDS:
            return _steps_block(self._moved())
        raise CannotMerge(f"blocks of kinds {', '.join(kind.name for kind in kinds)} need their base's values")

    def _placed(self) -> _Block:
        bits: Bits = np.zeros(self.elements, unit(self.dtype))
        for opened in self.opened:
            block.apply_block(bits, opened, self.dtype)
        packed = block.encode(None, bits, self.dtype)
        return _Block(kind=packed.kind, changed=packed.changed, data=packed.data)

    def _moved(self) -> Bits:
        """How far each element moved in all, modulo 2^width, shape [elements]."""
        moved: Bits = np.zeros(self.elements, unit(self.dtype))
        for opened in self.opened:
            positions, steps = block.read_steps(opened, self.elements, moved.dtype)
            moved[positions] = ulp.advance(moved[positions], steps, is_float=False)
        return moved


def _steps_block(moved: Bits) -> _Block:
    positions = np.flatnonzero(moved)
    ends = moved[positions]
    steps = ulp.steps(np.zeros_like(ends), ends, is_float=False)
    kind = Kind.GAPS if len(positions) else Kind.SAME
    return _Block(kind=kind, changed=len(positions), data=block.pack_steps(positions, steps))


def payload_reader(manifest: weights_pb2.Manifest, chunk: Callable[[bytes], bytes]) -> Callable[[int, int], bytes]:
    """How to read a payload of which `chunk` gives whole chunks by digest; the last one read is kept."""
    ends = list(itertools.accumulate(one.bytes for one in manifest.chunks))
    kept: dict[bytes, bytes] = {}

    def held(digest: bytes) -> bytes:
        if digest not in kept:
            kept.clear()
            kept[digest] = chunk(digest)
        return kept[digest]

    def read(offset: int, nbytes: int) -> bytes:
        parts = []
        for named, end in zip(manifest.chunks, ends, strict=True):
            start = end - named.bytes
            if start < offset + nbytes and offset < end:
                parts.append(held(named.digest)[max(0, offset - start) : offset + nbytes - start])
        return b"".join(parts)

    return read
