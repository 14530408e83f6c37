"""Several consecutive deltas as one, from their payloads alone: no weights are needed.

ULP steps add modulo 2^width, because the order of an element's bit patterns is a bijection (`forebay.wire.ulp`). So a
receiver that is many versions behind fetches each changed position once, and what moved there and back not at all.
Merging is associative in its effect: merged deltas merge.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from forebay.wire import block, ulp
from forebay.wire.block import BLOCK_BYTES, Kind, Opened
from forebay.wire.bytes_like import BytesLike, flat
from forebay.wire.chunker import Chunker
from forebay.wire.dtype import Bits, unit
from forebay.wire.encoder import Encoded, Written, write_blocks
from forebay.wire.errors import CorruptWeights, WeightsError, WireError
from forebay.wire.manifest import spec_of
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version

_ADDS = frozenset({Kind.GAPS, Kind.BITMASK})  #: ULP steps at places that the payload names


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


_Tables: TypeAlias = list[tuple[Delta, dict[str, weights_pb2.TensorEntry]]]


def merge(chain: Sequence[Delta], behind: Sequence[Delta] = ()) -> Encoded:
    """What leads from the base of the first of `chain` to the weights of the last, bit for bit.

    `behind` leads from an anchor to that base: tensors whose deltas need the base's values (XOR, CLASSES) are made
    again from there, and only those are read from it. Memory: the merged payload, and one tensor's part of every
    payload. When the first of `chain` is an anchor, so is the result. A manifest's `changed` counts the elements that
    are sent: of blocks that a later one replaced, all. Raises CannotMerge, CorruptWeights.
    """
    _check_chain([delta.manifest for delta in chain])
    if behind:
        _check_chain([delta.manifest for delta in (*behind, chain[0])])
    first, last = chain[0].manifest, chain[-1].manifest
    merged = weights_pb2.Manifest(
        format=last.format,
        version=last.version,
        anchor=first.anchor,
        base_digest=first.base_digest,
        digest=last.digest,
        model_bytes=last.model_bytes,
        elements=last.elements,
        model_digest=last.model_digest,
    )
    if first.HasField("base"):
        merged.base.CopyFrom(first.base)
    payload = Chunker()
    merged.tensors.extend(_merged_tensors(chain, behind, payload))
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
    chain: Sequence[Delta], behind: Sequence[Delta], payload: Chunker
) -> Iterator[weights_pb2.TensorEntry]:
    tables, tables_behind = _tables(chain), _tables(behind)
    for name in sorted({name for _, entries in tables for name in entries}):
        newest, contents = _parts(tables, name)
        entry = weights_pb2.TensorEntry(name=name, dtype=newest.dtype, shape=newest.shape, digest=newest.digest)
        try:
            blocks = list(_merged_blocks(newest, contents))
        except CannotMerge:
            if not behind or not behind[0].manifest.anchor:
                raise
            blocks = list(_blocks_by_value(newest, _parts(tables_behind, name)[1], contents))
        if chain[0].manifest.anchor or any(one.changed for one in blocks):
            write_blocks(entry, blocks, payload)
            yield entry


def _tables(chain: Sequence[Delta]) -> _Tables:
    return [(delta, {entry.name: entry for entry in delta.manifest.tensors}) for delta in chain]


def _parts(tables: _Tables, name: str) -> tuple[weights_pb2.TensorEntry, list[memoryview]]:
    """The newest entry of a tensor, and its bytes in every payload that has it."""
    own = [(delta, entries[name]) for delta, entries in tables if name in entries]
    shapes = {(entry.name, entry.dtype, tuple(entry.shape)) for _, entry in own}
    if len(shapes) != 1:
        raise CannotMerge(f"tensor {name} changed its type or shape on the way: {sorted(shapes)}")
    return own[-1][1], [flat(delta.read(entry.offset, entry.bytes)) for delta, entry in own]


def _merged_blocks(entry: weights_pb2.TensorEntry, contents: Sequence[memoryview]) -> Iterator[Written]:
    """Block after block of one tensor, of which `contents` has each delta's bytes."""
    for elements, opened in _side_by_side(entry, contents):
        chain = _Chain(dtype=entry.dtype, elements=elements)
        for one, data in opened:
            chain.add(one, data)
        yield chain.merged()


def _blocks_by_value(
    entry: weights_pb2.TensorEntry, behind: Sequence[memoryview], contents: Sequence[memoryview]
) -> Iterator[Written]:
    """The same, by making the base's values and the new ones, block after block."""
    first = 0
    for elements, opened in _side_by_side(entry, [*behind, *contents]):
        bits: Bits = np.zeros(elements, unit(entry.dtype))
        for one, _ in opened[: len(behind)]:
            block.apply_block(bits, one, entry.dtype, first=first)
        base = bits.copy()
        for one, _ in opened[len(behind) :]:
            block.apply_block(bits, one, entry.dtype, first=first)
        packed = block.encode(base, bits, entry.dtype, first=first)
        yield Written(kind=packed.kind, changed=packed.changed, data=packed.data)
        first += bits.nbytes


def _side_by_side(
    entry: weights_pb2.TensorEntry, contents: Sequence[memoryview]
) -> Iterator[tuple[int, list[tuple[Opened, memoryview]]]]:
    """For each block of a tensor: its elements, and what every delta has for it, opened and as bytes."""
    width = unit(entry.dtype).itemsize
    left = spec_of(entry).nbytes // width
    rests = list(contents)
    try:
        while left:
            elements = min(left, BLOCK_BYTES // width)
            opened = [(block.open_block(rest, elements, width), rest) for rest in rests]
            yield elements, [(one, rest[: one.used]) for one, rest in opened]
            rests = [rest[one.used :] for one, rest in opened]
            left -= elements
    except WireError as error:
        raise CorruptWeights(f"tensor {entry.name}: {error}") from error
    if any(map(len, rests)):
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

    def merged(self) -> Written:
        """One block in the place of all. Raises CannotMerge, WireError."""
        kinds = [opened.kind for opened in self.opened]
        if not kinds:
            return _steps_block(np.zeros(self.elements, unit(self.dtype)))
        if len(kinds) == 1:
            return Written(kind=kinds[0], changed=self.opened[0].changed, data=self.data)
        if kinds[0] is Kind.PLANES:
            return self._placed()
        if set(kinds) <= _ADDS:
            return _steps_block(self._moved())
        raise CannotMerge(f"blocks of kinds {', '.join(kind.name for kind in kinds)} need their base's values")

    def _placed(self) -> Written:
        bits: Bits = np.zeros(self.elements, unit(self.dtype))
        for opened in self.opened:
            block.apply_block(bits, opened, self.dtype)
        packed = block.encode(None, bits, self.dtype)
        return Written(kind=packed.kind, changed=packed.changed, data=packed.data)

    def _moved(self) -> Bits:
        """How far each element moved in all, modulo 2^width, shape [elements]."""
        moved: Bits = np.zeros(self.elements, unit(self.dtype))
        for opened in self.opened:
            positions, steps = block.read_steps(opened, self.elements, moved.dtype)
            moved[positions] = ulp.advance(moved[positions], steps, is_float=False)
        return moved


def _steps_block(moved: Bits) -> Written:
    positions = np.flatnonzero(moved)
    ends = moved[positions]
    steps = ulp.steps(np.zeros_like(ends), ends, is_float=False)
    kind = Kind.GAPS if len(positions) else Kind.SAME
    return Written(kind=kind, changed=len(positions), data=block.pack_steps(positions, steps))


def payload_reader(
    manifest: weights_pb2.Manifest, read_chunk: Callable[[bytes, int, int], bytes]
) -> Callable[[int, int], bytes]:
    """How to read a payload of which `read_chunk` gives so many bytes of a chunk, by digest, from an offset on."""
    ends = list(itertools.accumulate(one.bytes for one in manifest.chunks))

    def read(offset: int, nbytes: int) -> bytes:
        parts = []
        for named, end in zip(manifest.chunks, ends, strict=True):
            start = max(offset, end - named.bytes)
            length = min(offset + nbytes, end) - start
            if length > 0:
                parts.append(read_chunk(named.digest, start - end + named.bytes, length))
        return b"".join(parts)

    return read
