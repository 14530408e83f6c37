"""Weights on the wire: anchors, exact deltas, and applying them to a host state.

A payload is the blocks (`forebay.wire.block`) of its tensors, one after another, cut into chunks that are named by
their blake3. The manifest says which weights it leads from and to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from forebay.wire import block
from forebay.wire.block import BLOCK_BYTES, Kind
from forebay.wire.bytes_like import BytesLike, flat
from forebay.wire.digest import digest_of
from forebay.wire.dtype import Bits, is_float
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
    payload, digests = _Chunker(), new.tensor_digests()
    manifest = _manifest(new, digests, version)
    manifest.anchor = True
    entries = (_encode_tensor(None, new, slot, digests[slot["name"]], payload) for slot in new.layout)
    return _seal(manifest, entries, payload)


def encode_delta(base: HostState, new: HostState, *, version: Version, base_version: Version) -> Encoded:
    """What turns `base` into `new`, bit for bit. Unchanged tensors cost nothing; none costs more than in an anchor
    (of tensors above 256 KiB an anchor's size is judged by samples).

    Raises WeightsError when the states differ in their tensors, CorruptWeights when one is damaged.
    """
    if base.layout != new.layout:
        raise WeightsError("delta between states of different tensors, dtypes or shapes: publish an anchor instead")
    payload, old, digests = _Chunker(), base.tensor_digests(), new.tensor_digests()
    manifest = _manifest(new, digests, version)
    manifest.base.CopyFrom(base_version.to_proto())
    manifest.base_digest = base.digest_with(old)
    changed = (slot for slot in new.layout if old[slot["name"]] != digests[slot["name"]])
    entries = (_encode_tensor(base, new, slot, digests[slot["name"]], payload) for slot in changed)
    return _seal(manifest, entries, payload)


def apply(state: HostState, manifest: weights_pb2.Manifest, payload: BytesLike) -> None:
    """Bring `state` to the manifest's version in place, and prove it by its digest.

    Everything that can be checked beforehand is: sizes, chunk digests, the base. Raises WrongBase (state untouched) or
    CorruptWeights (state untouched, or marked damaged if the payload went wrong half-way: reload it then).
    """
    content = flat(payload)
    check_manifest(manifest)
    _check_fit(state, manifest)
    digests = _checked_base(state, manifest)
    check_payload(manifest, content)
    with _damage_on_failure(state, manifest):
        for entry in manifest.tensors:
            _apply_tensor(state, entry, content[entry.offset : entry.offset + entry.bytes])
            digests[entry.name] = entry.digest
        if state.digest_with(digests) != manifest.digest:
            raise WireError("the state's digest is not the manifest's")


@contextmanager
def _damage_on_failure(state: HostState, manifest: weights_pb2.Manifest) -> Iterator[None]:
    """From the first write until the proof, the state counts as damaged: a killed or failed update must not serve."""
    state.mark_damaged(f"its update to {Version.from_proto(manifest.version)} did not end")
    try:
        yield
    except WireError as error:
        problem = f"update to {Version.from_proto(manifest.version)} failed: {error}"
        state.mark_damaged(problem)
        raise CorruptWeights(f"{problem}; reload the weights from an anchor or checkpoint") from error
    state.mark_sound()


def _manifest(new: HostState, digests: Mapping[str, bytes], version: Version) -> weights_pb2.Manifest:
    return weights_pb2.Manifest(
        format=FORMAT,
        version=version.to_proto(),
        digest=new.digest_with(digests),
        model_bytes=new.model_bytes,
        elements=sum(len(new.view_of(name)) for name in new.names),
    )


def _encode_tensor(
    base: HostState | None, new: HostState, slot: Slot, digest: bytes, payload: _Chunker
) -> weights_pb2.TensorEntry:
    name, floating = slot["name"], is_float(slot["dtype"])
    entry = weights_pb2.TensorEntry(name=name, dtype=slot["dtype"], shape=slot["shape"], digest=digest)
    entry.offset, kinds = payload.written_bytes, set()
    for old_block, new_block in _block_pairs(base, new, name):
        kind, changed, packed = block.encode(old_block, new_block, is_float=floating)
        payload.write(packed)
        entry.changed += changed
        kinds.add(kind)
    entry.bytes, entry.codec = payload.written_bytes - entry.offset, _codec_name(kinds)
    return entry


def _seal(manifest: weights_pb2.Manifest, entries: Iterable[weights_pb2.TensorEntry], payload: _Chunker) -> Encoded:
    manifest.tensors.extend(entries)
    manifest.changed = sum(entry.changed for entry in manifest.tensors)
    manifest.chunks.extend(payload.close())
    manifest.payload_bytes = payload.written_bytes
    return Encoded(manifest=manifest, chunks=payload.chunks)


def _block_pairs(base: HostState | None, new: HostState, name: str) -> Iterator[tuple[Bits | None, Bits]]:
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


def _checked_base(state: HostState, manifest: weights_pb2.Manifest) -> dict[str, bytes]:
    """The tensors' digests as they are (an anchor replaces them all). Raises WrongBase."""
    if manifest.anchor:
        return {}
    digests = state.tensor_digests()
    held = state.digest_with(digests)
    if held != manifest.base_digest:
        raise WrongBase(
            f"the delta to {Version.from_proto(manifest.version)} is for {Version.from_proto(manifest.base)} "
            f"(digest {manifest.base_digest.hex()[:12]}), these weights are {held.hex()[:12]}: take another path"
        )
    return digests


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
