"""Published weights: chunks by content, and manifests that make versions visible at once.

A version exists when its manifest does; the manifest is written after every chunk is durable. Chunks are named by their
blake3, so a publication that is repeated or resumed sends only what is missing. Beside the manifest that the learner
published, a version may have others that lead to it from further back (`forebay.buffer.weight_merger`). Methods block
on the store: call them from a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

from forebay.buffer.answers import EncodedWeights
from forebay.buffer.disk import Disk
from forebay.buffer.errors import CallRefused, ChunkGone
from forebay.buffer.weight_key import Key, read_manifests
from forebay.buffer.weight_place import LocalPlace, Place
from forebay.wire.digest import DIGEST_BYTES, digest_of
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 64 << 20

#: A plan is good for this long: what it names is not deleted before.
PLAN_GOOD_FOR_S = 600.0


class WeightStore:
    """The weight versions of one run."""

    def __init__(
        self,
        folder: Path,
        *,
        place: Place | None = None,
        disk: Disk | None = None,
        keep_anchors: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder` of this machine holds the objects, unless a `place` elsewhere does. Raises OSError, DecodeError."""
        self.folder, self.place = folder, place or LocalPlace(folder, disk)
        self._keep_anchors, self._clock = keep_anchors, clock
        self._lock, self._tidying = threading.Lock(), threading.Lock()
        self._pins: dict[Key, float] = {}
        self._whole = set[Key]()  #: anchors whose chunks were read back and are what they should be
        self.place.settle()
        self.manifests = read_manifests(self.place)
        self._sizes = self.place.sizes("chunks")

    @property
    def stored_bytes(self) -> int:
        """Bytes of all chunks and manifests."""
        return sum(self._sizes.copy().values()) + sum(manifest.ByteSize() for manifest in self.manifests.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes of this machine's disk that they take."""
        return self.stored_bytes if isinstance(self.place, LocalPlace) else 0

    def published(self, version: Version) -> weights_pb2.Manifest | None:
        """The version's manifest as the learner published it."""
        return self.manifests.get(Key(version))

    def key_of(self, manifest: weights_pb2.Manifest) -> Key:
        """The key of one of `manifests`' values."""
        key = Key.of(manifest, merged=False)
        return key if self.manifests.get(key) is manifest else Key.of(manifest, merged=True)

    def edges(self, valid: Iterable[Version]) -> list[weights_pb2.Manifest]:
        """Every manifest that leads to one of the `valid` versions."""
        wanted = set(valid)
        return [manifest for key, manifest in self.manifests.items() if key.version in wanted]

    def missing(self, chunks: Iterable[weights_pb2.Chunk]) -> list[bytes]:
        """Digests of the chunks that are not here, in the order asked."""
        return [chunk.digest for chunk in chunks if self._sizes.get(chunk.digest.hex()) != chunk.bytes]

    def put_chunk(self, digest: bytes, data: bytes) -> int:
        """Store a chunk durably; bytes that were new. Raises CallRefused when the data is not what it says."""
        name = digest.hex()
        if len(digest) != DIGEST_BYTES or digest_of(data) != digest:
            raise CallRefused(f"chunk {name} does not match its digest: it was damaged on the way; send it again")
        if self._sizes.get(name) == len(data):
            return 0
        self.place.put(f"chunks/{name}", data)
        with self._lock:
            self._sizes[name] = len(data)
        return len(data)

    def put_manifest(self, manifest: weights_pb2.Manifest, *, merged: bool = False) -> None:
        """Make a version visible, or another way to it, durably. Raises CallRefused while a chunk of it is missing."""
        missing = self.missing(manifest.chunks)
        key = Key.of(manifest, merged=merged)
        if missing:
            raise CallRefused(
                f"version {key.version} lacks {len(missing)} of its {len(manifest.chunks)} chunks: send them"
            )
        self.place.put(key.name, manifest.SerializeToString())
        with self._lock:
            self.manifests = {**self.manifests, key: manifest}

    def put_merged(self, encoded: EncodedWeights) -> None:
        """Store another way to a version; nothing happens when the version, or its base, is gone meanwhile."""
        key = Key.of(encoded.manifest, merged=True)
        with self._tidying:
            if Key(key.version) not in self.manifests or key.base is None or Key(key.base) not in self.manifests:
                return
            for digest, data in encoded.chunks.items():
                self.put_chunk(digest, data)
            self.put_manifest(encoded.manifest, merged=True)

    def read_chunk(self, digest: bytes, offset: int = 0, limit: int | None = None) -> bytes:
        """At most `limit` bytes of a chunk from `offset`. Raises ChunkGone, CallRefused."""
        name, size = digest.hex(), self._sizes.get(digest.hex())
        if size is None:
            raise ChunkGone(f"chunk {name} is not (or no longer) in the store: make a new plan")
        if not 0 <= offset <= size:
            raise CallRefused(f"chunk {name} has {size} bytes: an offset of {offset} lies outside")
        try:
            return self.place.get(f"chunks/{name}", offset, limit)
        except FileNotFoundError as error:
            raise ChunkGone(f"chunk {name} was deleted: make a new plan") from error

    def pin(self, path: Iterable[weights_pb2.Manifest]) -> None:
        """A plan with these manifests was given out: keep them for as long as it is good."""
        until = self._clock() + PLAN_GOOD_FOR_S
        keys = [self.key_of(manifest) for manifest in path]
        with self._lock:
            self._pins |= dict.fromkeys(keys, until)

    def collect(self, valid: Sequence[Version]) -> list[Version]:
        """Delete what no plan needs: all before the `keep_anchors`-th newest anchor, and void versions.

        Anchors count when their chunks, read back, are whole. `valid` are the published versions that are not void.
        Pinned manifests stay. Returns the versions deleted.
        """
        known = sorted(version for version in valid if Key(version) in self.manifests)
        anchors = [version for version in known if self.manifests[Key(version)].anchor]
        first = self._first_kept(anchors) if len(anchors) > self._keep_anchors else min(anchors, default=None)
        with self._tidying:  # chunks that `put_merged` has stored are nobody's until their manifest is there
            return self._collect(known, first)

    def _first_kept(self, anchors: Sequence[Version]) -> Version:
        """The `keep_anchors`-th newest anchor that is whole, or the oldest that is there."""
        whole = (version for version in reversed(anchors) if self._is_whole(version))
        kept = list(islice(whole, self._keep_anchors))
        return kept[-1] if len(kept) == self._keep_anchors else anchors[0]

    def _is_whole(self, version: Version) -> bool:
        key = Key(version)
        self._whole &= self.manifests.keys()
        if key not in self._whole:
            try:
                damaged = [chunk for chunk in self.manifests[key].chunks if not self._reads_well(chunk)]
            except ChunkGone as error:
                log.warning("anchor %s does not count: %s", version, error)
                return False
            if damaged:
                log.warning("anchor %s does not count: chunk %s is damaged", version, damaged[0].digest.hex())
                return False
            self._whole.add(key)
        return True

    def _reads_well(self, chunk: weights_pb2.Chunk) -> bool:
        return bool(digest_of(self.read_chunk(chunk.digest)) == chunk.digest)

    def _collect(self, valid: Sequence[Version], first: Version | None) -> list[Version]:
        with self._lock:
            keep = self._kept(valid, first)
            gone = [key for key in self.manifests if key not in keep]
            self.manifests = {key: manifest for key, manifest in self.manifests.items() if key in keep}
            used = {chunk.digest.hex() for manifest in self.manifests.values() for chunk in manifest.chunks}
            orphans = [name for name in self._sizes if name not in used] if gone else []
            for name in orphans:
                del self._sizes[name]
        if gone:  # durably before its chunks: power loss must not bring a manifest back without them
            self.place.delete([key.name for key in gone])
            self.place.delete([f"chunks/{name}" for name in orphans])
        return [key.version for key in gone if key.base is None]

    def _kept(self, valid: Sequence[Version], first: Version | None) -> set[Key]:
        now = self._clock()
        self._pins = {key: until for key, until in self._pins.items() if until > now}
        if first is None:
            return set(self.manifests)
        wanted = {version for version in valid if version >= first}
        kept = {key for key in self.manifests if key.version in wanted and (key.base is None or key.base in wanted)}
        return kept | (self._pins.keys() & self.manifests.keys())
