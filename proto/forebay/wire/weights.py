"""Weights on the wire: anchors, exact deltas, and applying them to a host state.

A payload is the blocks (`forebay.wire.block`) of its tensors, one after another, cut into chunks that are named by their
blake3. The manifest says which weights it leads from and to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.wire import block
from forebay.wire.block import BLOCK_BYTES, Kind
from forebay.wire.bounded_zstd import BytesLike
from forebay.wire.digest import digest_of
from forebay.wire.dtype import is_float
from forebay.wire.errors import CorruptWeights, WeightsError, WireError, WrongBase
from forebay.wire.host_state import HostState, Slot, TensorSpec, blocks_of
from forebay.wire.manifest import FORMAT, check_manifest, check_payload
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version

__all__ = [
    "CHUNK_BYTES",
    "CorruptWeights",
    "Encoded",
    "HostState",
    "Slot",
    "TensorSpec",
    "WeightsError",
    "WrongBase",
    "apply",
    "check_manifest",
    "encode_anchor",
    "encode_delta",
]

CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A version ready to be stored: its manifest, and the chunks that the manifest names, by digest."""

    manifest: weights_pb2.Manifest
    chunks: dict[bytes, bytes]

    def payload(self) -> bytes:
        """The chunks in payload order, as `apply` takes them."""
        return b"".join(self.chunks[chunk.digest] for chunk in self.manifest.chunks)


def encode_anchor(new: HostState, *, version: Version) -> Encoded:
    """A full snapshot of `new`. Raises CorruptWeights when that state is damaged."""
    manifest = _manifest(new, version)
    manifest.anchor = True
    return _encode(None, new, manifest)


def encode_delta(base: HostState, new: HostState, *, version: Version, base_version: Version) -> Encoded:
    """What turns `base` into `new`, bit for bit. Unchanged tensors cost nothing; none costs more than in an anchor.

    Raises WeightsError when the states differ in their tensors, CorruptWeights when one is damaged.
    """
    if base.layout != new.layout:
        raise WeightsError("delta between states of different tensors, dtypes or shapes: publish an anchor instead")
    manifest = _manifest(new, version)
    manifest.base.CopyFrom(base_version.to_proto())
    manifest.base_digest = base.digest()
    return _encode(base, new, manifest)


def apply(state: HostState, manifest: weights_pb2.Manifest, payload: BytesLike) -> None:
    """Bring `state` to the manifest's version in place, and prove it by its digest.

    Everything that can be checked beforehand is: sizes, chunk digests, the base. Raises WrongBase (state untouched) or
    CorruptWeights (state untouched, or marked damaged if the payload went wrong half-way: reload it then).
    """
    content = memoryview(payload).cast("B")
    check_manifest(manifest)
    _check_fit(state, manifest)
    _check_base(state, manifest)
    check_payload(manifest, content)
    state.mark_damaged(f"its update to {Version.from_proto(manifest.version)} did not end")
    try:
        for entry in manifest.tensors:
            _apply_tensor(state, entry, content[entry.offset : entry.offset + entry.bytes])
        state.mark_sound()
        if state.digest() != manifest.digest:
            raise WireError("the state's digest is not the manifest's")
    except WireError as error:
        problem = f"update to {Version.from_proto(manifest.version)} failed: {error}"
        state.mark_damaged(problem)
        raise CorruptWeights(f"{problem}; reload the weights from an anchor or checkpoint") from error


def _manifest(new: HostState, version: Version) -> weights_pb2.Manifest:
    elements = sum(len(new.view_of(name)) for name in new.names)
    return weights_pb2.Manifest(
        format=FORMAT, version=version.to_proto(), digest=new.digest(), model_bytes=new.model_bytes, elements=elements
    )


def _encode(base: HostState | None, new: HostState, manifest: weights_pb2.Manifest) -> Encoded:
    payload = _Chunker()
    for slot in new.layout:
        if base is not None and base.tensor_digest(slot["name"]) == new.tensor_digest(slot["name"]):
            continue
        entry = _encode_tensor(base, new, slot, payload)
        manifest.tensors.append(entry)
        manifest.changed += entry.changed
    manifest.chunks.extend(payload.close())
    manifest.payload_bytes = payload.written_bytes
    return Encoded(manifest=manifest, chunks=payload.chunks)


def _encode_tensor(base: HostState | None, new: HostState, slot: Slot, payload: _Chunker) -> weights_pb2.TensorEntry:
    name, floating = slot["name"], is_float(slot["dtype"])
    entry = weights_pb2.TensorEntry(name=name, dtype=slot["dtype"], shape=slot["shape"])
    entry.offset, entry.digest = payload.written_bytes, new.tensor_digest(name)
    kinds = set()
    for old_block, new_block in _block_pairs(base, new, name):
        kind, changed, packed = block.encode(old_block, new_block, is_float=floating)
        payload.write(packed)
        entry.changed += changed
        kinds.add(kind)
    entry.bytes, entry.codec = payload.written_bytes - entry.offset, _codec_name(kinds)
    return entry


def _block_pairs(base: HostState | None, new: HostState, name: str) -> Iterator[tuple[block.Bits | None, block.Bits]]:
    fresh = blocks_of(new.view_of(name), BLOCK_BYTES)
    if base is None:
        return ((None, bits) for bits in fresh)
    return zip(blocks_of(base.view_of(name), BLOCK_BYTES), fresh, strict=True)


def _codec_name(kinds: set[Kind]) -> str:
    """For people: what the tensor's blocks are coded as."""
    dense = kinds & {Kind.XOR, Kind.PLANES}
    if Kind.GAPS in kinds:
        return "mixed" if dense else "gap-ulp"
    return "planes"


def _check_fit(state: HostState, manifest: weights_pb2.Manifest) -> None:
    """The manifest must speak of the tensors that the state has, an anchor of all of them."""
    slots = {slot["name"]: slot for slot in state.layout}
    for entry in manifest.tensors:
        slot = slots.get(entry.name)
        if slot is None or slot["dtype"] != entry.dtype or slot["shape"] != list(entry.shape):
            raise CorruptWeights(
                f"tensor {entry.name} {entry.dtype} {list(entry.shape)} is not in these weights as such"
            )
    if manifest.anchor and len(manifest.tensors) != len(slots):
        raise CorruptWeights(f"anchor with {len(manifest.tensors)} of {len(slots)} tensors")


def _check_base(state: HostState, manifest: weights_pb2.Manifest) -> None:
    if manifest.anchor:
        return
    held = state.digest()
    if held != manifest.base_digest:
        raise WrongBase(
            f"the delta to {Version.from_proto(manifest.version)} is for {Version.from_proto(manifest.base)} "
            f"(digest {manifest.base_digest.hex()[:12]}), these weights are {held.hex()[:12]}: take another path"
        )


def _apply_tensor(state: HostState, entry: weights_pb2.TensorEntry, data: memoryview) -> None:
    floating, changed = is_float(entry.dtype), 0
    for target in blocks_of(state.open_for_update(entry.name), BLOCK_BYTES):
        _, count, used = block.decode_into(target, data, is_float=floating)
        changed += count
        data = data[used:]
    if len(data) or changed != entry.changed:
        raise WireError(f"tensor {entry.name}: {changed} elements changed and {len(data)} bytes are left over")
    if state.tensor_digest(entry.name) != entry.digest:
        raise WireError(f"tensor {entry.name}: its digest is not the manifest's")


class _Chunker:
    """Cuts what is written into chunks of CHUNK_BYTES and names them."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, bytes] = {}
        self.written_bytes = 0
        self._named: list[weights_pb2.Chunk] = []
        self._open = bytearray()

    def write(self, data: bytes) -> None:
        self._open += data
        self.written_bytes += len(data)
        while len(self._open) >= CHUNK_BYTES:
            self._cut(CHUNK_BYTES)

    def close(self) -> list[weights_pb2.Chunk]:
        """The last, shorter chunk too: all of them in payload order."""
        if self._open:
            self._cut(len(self._open))
        return self._named

    def _cut(self, size: int) -> None:
        data = bytes(self._open[:size])
        del self._open[:size]
        digest = digest_of(data)
        self.chunks[digest] = data
        self._named.append(weights_pb2.Chunk(digest=digest, bytes=size))
