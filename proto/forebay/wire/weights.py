"""Weights on the wire: anchors, exact deltas, and applying them to a host state.

A payload is the blocks (`forebay.wire.block`) of its tensors, one after another, cut into chunks that are named by
their blake3. The manifest says which weights it leads from and to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from forebay.wire import block
from forebay.wire.block import BLOCK_BYTES
from forebay.wire.bytes_like import BytesLike, flat
from forebay.wire.chunker import CHUNK_BYTES
from forebay.wire.encoder import Encoded, encode
from forebay.wire.errors import CorruptWeights, WeightsError, WireError, WrongBase
from forebay.wire.fingerprint import packed, plus, unpacked
from forebay.wire.host_state import HostState, Slot, TensorSpec, blocks_of
from forebay.wire.manifest import FORMAT, check_manifest, check_payload
from forebay.wire.parallel import batched, in_order
from forebay.wire.undo import Piece, Undo
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version

__all__ = [
    "CHUNK_BYTES",
    "CorruptWeights",
    "Encoded",
    "HostState",
    "Slot",
    "TensorSpec",
    "Undo",
    "WeightsError",
    "WrongBase",
    "apply",
    "check_manifest",
    "encode_anchor",
    "encode_delta",
]


def encode_anchor(new: HostState, *, version: Version) -> Encoded:
    """A full snapshot of `new`. Raises CorruptWeights when that state is damaged."""
    new.require_sound()
    return encode(None, new, _manifest(new, version, anchor=True), classes=False)


def encode_delta(
    base: HostState, new: HostState, *, version: Version, base_version: Version, classes: bool = False
) -> Encoded:
    """What turns `base` into `new`, bit for bit. Unchanged tensors cost nothing; none costs more than in an anchor
    (of tensors above 16 KiB an anchor's size is judged by samples). `classes` also tries the form for slow links.

    Raises WeightsError when the states differ in their tensors, CorruptWeights when one is damaged.
    """
    if base.layout != new.layout:
        raise WeightsError("delta between states of different tensors, dtypes or shapes: publish an anchor instead")
    new.require_sound()
    manifest = _manifest(new, version, anchor=False)
    manifest.base.CopyFrom(base_version.to_proto())
    manifest.base_digest = base.digest()
    return encode(base, new, manifest, classes=classes)


def apply(state: HostState, manifest: weights_pb2.Manifest, payload: BytesLike, *, keep_undo: bool = False) -> Undo:
    """Bring `state` to the manifest's version in place, and prove it by its digest.

    Everything that can be checked beforehand is: sizes, chunk digests, the base. Raises WrongBase (state untouched) or
    CorruptWeights: then the state is untouched too, but if the payload went wrong half-way it is put back only with
    `keep_undo`, and else marked damaged (reload it then). What is returned leads back, for as long as it is kept.
    """
    content = flat(payload)
    check_manifest(manifest)
    _check_fit(state, manifest)
    digests = _checked_base(state, manifest)
    check_payload(manifest, content)
    undo = Undo(state, keep=keep_undo)
    with _damage_on_failure(state, manifest, undo):
        digests |= _apply_tensors(state, manifest, content, digests, undo)
        if state.digest_with(digests) != manifest.digest:
            raise WireError("the state's digest is not the manifest's")
    state.mark_sound(digests)
    return undo


@contextmanager
def _damage_on_failure(state: HostState, manifest: weights_pb2.Manifest, undo: Undo) -> Iterator[None]:
    """From the first write until the proof, the state counts as damaged: a killed or failed update must not serve."""
    version = Version.from_proto(manifest.version)
    state.mark_damaged(f"its update to {version} did not end")
    try:
        yield
    except WireError as error:
        problem = f"update to {version} failed: {error}"
        if undo.roll_back():
            raise CorruptWeights(f"{problem}; the weights are as before") from error
        state.mark_damaged(problem)
        raise CorruptWeights(f"{problem}; reload the weights from an anchor or checkpoint") from error


def _manifest(new: HostState, version: Version, *, anchor: bool) -> weights_pb2.Manifest:
    return weights_pb2.Manifest(
        format=FORMAT,
        version=version.to_proto(),
        anchor=anchor,
        model_bytes=new.model_bytes,
        elements=sum(len(new.view_of(name)) for name in new.names),
    )


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


def _apply_tensors(
    state: HostState, manifest: weights_pb2.Manifest, content: memoryview, before: dict[str, bytes], undo: Undo
) -> dict[str, bytes]:
    """All tensors of the manifest, several blocks at once; their digests, the manifest's own. Raises WireError."""
    sums = {name: unpacked(digest) for name, digest in before.items()}
    pieces = (
        piece
        for entry in manifest.tensors
        for piece in _open_tensor(state, entry, content[entry.offset : entry.offset + entry.bytes])
    )
    for done in in_order(undo.apply_all, batched(pieces, lambda piece: piece.target.nbytes)):
        for name, change in done:
            sums[name] = plus(sums[name], change) if name in before else change
    return {entry.name: _proved(state, entry, sums, known=entry.name in before) for entry in manifest.tensors}


def _proved(
    state: HostState, entry: weights_pb2.TensorEntry, sums: dict[str, tuple[int, int]], *, known: bool
) -> bytes:
    """A tensor's digest from that of its base and its changes; without a base, from what stands there now."""
    digest = packed(sums[entry.name]) if known else state.tensor_digest(entry.name)
    if digest != entry.digest:
        raise WireError(f"tensor {entry.name}: its digest is not the manifest's")
    return digest


def _open_tensor(state: HostState, entry: weights_pb2.TensorEntry, data: memoryview) -> Iterator[Piece]:
    changed, first = 0, 0
    for target in blocks_of(state.open_for_update(entry.name), BLOCK_BYTES):
        opened = block.open_block(data, len(target), target.itemsize)
        yield Piece(name=entry.name, dtype=entry.dtype, target=target, first=first, opened=opened)
        changed, first, data = changed + opened.changed, first + target.nbytes, data[opened.used :]
    if len(data) or changed != entry.changed:
        raise WireError(f"tensor {entry.name}: {changed} elements changed and {len(data)} bytes are left over")
