"""Names of manifests in a weight store: `1.5.manifest` as the learner published it, `1.5-1.0.manifest` merged."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from forebay.buffer.weight_place import Place
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version

FOLDER = "manifests"
_SUFFIX = ".manifest"
_READERS = 8


@dataclass(frozen=True, slots=True)
class Key:
    """A way to `version`: the published one, or with `base` several deltas merged, from that version on."""

    version: Version
    base: Version | None = None

    @classmethod
    def of(cls, manifest: weights_pb2.Manifest, *, merged: bool) -> Key:
        """The key of a manifest."""
        return cls(Version.from_proto(manifest.version), Version.from_proto(manifest.base) if merged else None)

    @classmethod
    def parse(cls, name: str) -> Key:
        """Read what `name` wrote, without its folder. Raises ValueError."""
        version, _, base = name.removesuffix(_SUFFIX).partition("-")
        return cls(Version.parse(version), Version.parse(base) if base else None)

    @property
    def name(self) -> str:
        """The object's name in the store, folder included."""
        return f"{FOLDER}/{self.version}{f'-{self.base}' if self.base else ''}{_SUFFIX}"


def read_manifest(place: Place, name: str) -> tuple[Key, weights_pb2.Manifest]:
    """The manifest in the object `name` (without folder). Raises DecodeError when it is none, OSError."""
    manifest = weights_pb2.Manifest.FromString(place.get(f"{FOLDER}/{name}"))
    try:
        key = Key.parse(name)
    except ValueError as error:
        raise DecodeError(f"{name} is no name of a manifest") from error
    if key != Key.of(manifest, merged=key.base is not None):
        raise DecodeError("it names another version than its file")
    return key, manifest


def read_manifests(place: Place) -> dict[Key, weights_pb2.Manifest]:
    """All of them, by version, published ones first. Raises DecodeError, OSError."""
    names = [name for name in place.sizes(FOLDER) if name.endswith(_SUFFIX)]
    with ThreadPoolExecutor(_READERS) as readers:
        found = dict(readers.map(lambda name: read_manifest(place, name), names))
    return dict(sorted(found.items(), key=lambda item: (item[0].version, item[0].base or Version(-1, -1))))
