"""Manifests of weights: what must hold of one before a byte of its payload is looked at."""

from __future__ import annotations

import itertools

from forebay.wire.digest import DIGEST_BYTES, digest_of
from forebay.wire.errors import CorruptWeights, WeightsError
from forebay.wire.fingerprint import FINGERPRINT_BYTES
from forebay.wire.host_state import TensorSpec
from forebay.wire.parallel import in_order
from forebay.wire.v1 import weights_pb2

FORMAT = 2  #: 1 had blake3 digests of tensors; no release wrote it
MAX_CHUNK_BYTES = 1 << 24
MAX_TENSORS = 1 << 20
MAX_DIMENSIONS = 64


def spec_of(entry: weights_pb2.TensorEntry) -> TensorSpec:
    """The tensor that an entry speaks of."""
    return TensorSpec(name=entry.name, dtype=entry.dtype, shape=tuple(entry.shape))


def check_manifest(manifest: weights_pb2.Manifest) -> None:
    """Format, digests, and that tensors and chunks tile the payload. Cheap. Raises CorruptWeights."""
    _require(manifest.format == FORMAT, f"weight format {manifest.format}, this program reads {FORMAT}")
    _require(len(manifest.digest) == DIGEST_BYTES, "no state digest")
    base_bytes = 0 if manifest.anchor else DIGEST_BYTES
    _require(len(manifest.base_digest) == base_bytes, "an anchor has no base, a delta has one")
    _check_chunks(manifest)
    _check_tensors(manifest)


def check_payload(manifest: weights_pb2.Manifest, payload: memoryview) -> None:
    """Every chunk of the payload is the one that the manifest names. Raises CorruptWeights."""
    _require(len(payload) == manifest.payload_bytes, f"payload of {len(payload)} bytes, not {manifest.payload_bytes}")
    starts = itertools.accumulate((chunk.bytes for chunk in manifest.chunks), initial=0)
    pieces = [payload[start : start + chunk.bytes] for start, chunk in zip(starts, manifest.chunks, strict=False)]
    for chunk, piece, digest in zip(manifest.chunks, pieces, in_order(digest_of, pieces), strict=True):
        _require(digest == chunk.digest, f"the chunk {chunk.digest.hex()[:12]} of {len(piece)} bytes is damaged")


def _check_chunks(manifest: weights_pb2.Manifest) -> None:
    for chunk in manifest.chunks:
        _require(
            0 < chunk.bytes <= MAX_CHUNK_BYTES and len(chunk.digest) == DIGEST_BYTES, "a chunk without size or name"
        )
    total = sum(chunk.bytes for chunk in manifest.chunks)
    _require(total == manifest.payload_bytes, f"chunks of {total} bytes for a payload of {manifest.payload_bytes}")


def _check_tensors(manifest: weights_pb2.Manifest) -> None:
    _require(len(manifest.tensors) <= MAX_TENSORS, f"{len(manifest.tensors)} tensors, at most {MAX_TENSORS} are read")
    at, before = 0, None
    for entry in manifest.tensors:
        problem = _problem_of(entry, at, before)
        _require(not problem, f"tensor {entry.name}{problem}")
        at, before = at + entry.bytes, entry.name
    _require(at == manifest.payload_bytes, f"tensors of {at} bytes in a payload of {manifest.payload_bytes}")


def _problem_of(entry: weights_pb2.TensorEntry, at: int, before: str | None) -> str:
    """What is wrong with an entry that should follow `before` and begin at `at`."""
    if before is not None and before >= entry.name:
        return " is out of order"
    if entry.offset != at:
        return " does not follow the one before it"
    if len(entry.digest) != FINGERPRINT_BYTES:
        return " has no digest"
    if len(entry.shape) > MAX_DIMENSIONS:
        return f" of {len(entry.shape)} dimensions"
    return ": more elements changed than it has" if entry.changed > _elements(entry) else ""


def _elements(entry: weights_pb2.TensorEntry) -> int:
    spec = spec_of(entry)
    try:
        return max(spec.elements, spec.nbytes)  # sub-byte elements are counted in bytes, which are fewer
    except WeightsError as error:
        raise CorruptWeights(f"manifest: {error}") from error


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise CorruptWeights(f"manifest: {problem}")
