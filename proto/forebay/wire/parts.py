"""A version that several processes encode: each the tensors that it has, put together to one manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from forebay.wire.digest import state_digest
from forebay.wire.encoder import Encoded
from forebay.wire.host_state import HostState, TensorSpec

Tensor = tuple[str, str, Sequence[int], bytes]  #: name, dtype, shape, fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPart:
    """What one process has encoded of a version."""

    encoded: Encoded
    tensors: tuple[Tensor, ...]  #: all of the part's, changed or not

    @classmethod
    def of(cls, encoded: Encoded, state: HostState) -> EncodedPart:
        """`state`: the one that was encoded."""
        digests = state.tensor_digests()
        return cls(
            encoded=encoded,
            tensors=tuple((s["name"], s["dtype"], s["shape"], digests[s["name"]]) for s in state.layout),
        )


def share_out(specs: Sequence[TensorSpec], parts: int) -> list[list[TensorSpec]]:
    """Runs of tensors in name order, one for each process, of about as many bytes as tensors can be cut into."""
    ordered = sorted(specs, key=lambda spec: spec.name)
    ends = list(accumulate(spec.nbytes for spec in ordered))
    shares: list[list[TensorSpec]] = [[] for _ in range(parts)]
    for spec, end in zip(ordered, ends, strict=True):
        middle = end - spec.nbytes / 2
        shares[min(parts - 1, int(middle * parts / max(1, ends[-1])))].append(spec)
    return shares


def join(parts: Sequence[EncodedPart], base_digest: bytes) -> Encoded:
    """One version of parts whose tensors follow each other in name order; `base_digest` is the whole base's, empty for
    an anchor."""
    first = parts[0].encoded.manifest
    whole = type(first)(format=first.format, version=first.version, anchor=first.anchor, base_digest=base_digest)
    if not first.anchor:
        whole.base.CopyFrom(first.base)
    chunks: dict[bytes, bytes] = {}
    for part in parts:
        manifest, start = part.encoded.manifest, whole.payload_bytes
        for entry in manifest.tensors:
            whole.tensors.add().CopyFrom(entry)
            whole.tensors[-1].offset += start
        whole.chunks.extend(manifest.chunks)
        whole.payload_bytes += manifest.payload_bytes
        whole.model_bytes += manifest.model_bytes
        whole.elements += manifest.elements
        whole.changed += manifest.changed
        chunks |= part.encoded.chunks
    whole.digest = state_digest(tensor for part in parts for tensor in part.tensors)
    return Encoded(manifest=whole, chunks=chunks)
