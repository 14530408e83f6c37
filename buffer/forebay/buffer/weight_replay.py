"""Weights made again from what a store holds: from an anchor on, delta by delta, each step proved by digest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from forebay.buffer.errors import ReservoirError
from forebay.buffer.weight_key import Key
from forebay.buffer.weight_place import Place
from forebay.buffer.weight_plan import NOTHING, cheapest_path
from forebay.errors import UsageError
from forebay.wire.errors import WeightsError
from forebay.wire.host_state import HostState
from forebay.wire.manifest import spec_of
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version
from forebay.wire.weights import apply


class VersionUnreachable(ReservoirError):
    """No whole anchor and deltas in the store lead to the version."""


class Replay:
    """A host copy that is led from version to version. Memory: the weights, and one payload."""

    def __init__(self, place: Place, manifests: Mapping[Key, weights_pb2.Manifest]) -> None:
        self._place, self._manifests = place, manifests
        self._state: HostState | None = None

    def weights_of(self, version: Version) -> HostState:
        """The weights of a published version. Raises UsageError, VersionUnreachable, CorruptWeights, OSError."""
        manifest = self._manifests.get(Key(version))
        if manifest is None:
            kept = ", ".join(str(key.version) for key in self._manifests if key.base is None)
            raise UsageError(f"version {version} is not in {self._place.url}: it has {kept or 'none'}")
        return self._lead_to(manifest.digest, self._manifests.values())

    def prove(self) -> Iterator[tuple[Key, str]]:
        """Apply every manifest to its base; each one's key, and what is wrong with it, or nothing."""
        whole = dict(self._manifests)
        for key in sorted(
            self._manifests, key=lambda key: (key.base is not None, key.version, key.base or key.version)
        ):
            try:
                self._prove(self._manifests[key], [other for at, other in whole.items() if at != key])
                yield key, ""
            except (WeightsError, VersionUnreachable, OSError) as error:
                del whole[key]  # and see whether there is another way for those who would have used it
                self._state = None
                yield key, str(error)

    def _prove(self, manifest: weights_pb2.Manifest, others: Collection[weights_pb2.Manifest]) -> None:
        if not manifest.anchor:
            self._lead_to(manifest.base_digest, others)
        self._apply(manifest)

    def _lead_to(self, digest: bytes, usable: Collection[weights_pb2.Manifest]) -> HostState:
        held = self._state.digest() if self._state is not None else NOTHING
        path = cheapest_path(usable, held, digest)
        if path is None:
            raise VersionUnreachable(f"{self._place.url}: no anchor leads to the weights {digest.hex()[:12]}")
        for manifest in path:
            self._apply(manifest)
        assert self._state is not None
        return self._state

    def _apply(self, manifest: weights_pb2.Manifest) -> None:
        if manifest.anchor:
            specs = [spec_of(entry) for entry in manifest.tensors]
            if self._state is None or self._state.specs != specs:
                self._state = HostState.allocate(specs)
        assert self._state is not None
        payload = b"".join(self._place.get(f"chunks/{chunk.digest.hex()}") for chunk in manifest.chunks)
        apply(self._state, manifest, payload)
