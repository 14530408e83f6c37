"""Published weights on disk: chunks by content, and one manifest a version that makes them visible at once.

A version exists when its manifest does; the manifest is written after every chunk is durable. Chunks are named by their
blake3, so a publication that is repeated or resumed sends only what is missing. Methods block on the disk: call them
from a thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import blake3

from forebay.buffer.disk import Disk
from forebay.buffer.errors import CallRefused, ChunkGone
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 64 << 20
DIGEST_BYTES = 32

#: A plan is good for this long: what it names is not deleted before.
PLAN_GOOD_FOR_S = 600.0


class WeightStore:
    """The weight versions of one run."""

    def __init__(
        self,
        folder: Path,
        *,
        disk: Disk | None = None,
        keep_anchors: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._disk, self._keep_anchors, self._clock = disk or Disk(), keep_anchors, clock
        self._chunks, self._manifests = folder / "chunks", folder / "manifests"
        for path in (self._chunks, self._manifests):
            path.mkdir(parents=True, exist_ok=True)
        for path in (folder, self._chunks, self._manifests):  # a killed process may have left renames unsynced
            self._disk.sync_folder(path)
        self._lock = threading.Lock()
        self._pins: dict[Version, float] = {}
        self.manifests = self._load()
        self._sizes = {path.name: path.stat().st_size for path in self._chunks.iterdir() if path.suffix != ".tmp"}

    @property
    def disk_bytes(self) -> int:
        """Bytes of all chunks and manifests."""
        return sum(self._sizes.values()) + sum(manifest.ByteSize() for manifest in self.manifests.values())

    def missing(self, chunks: Iterable[weights_pb2.Chunk]) -> list[bytes]:
        """Digests of the chunks that are not here, in the order asked."""
        return [chunk.digest for chunk in chunks if self._sizes.get(chunk.digest.hex()) != chunk.bytes]

    def put_chunk(self, digest: bytes, data: bytes) -> int:
        """Store a chunk durably; bytes that were new. Raises CallRefused when the data is not what it says."""
        name = digest.hex()
        if len(digest) != DIGEST_BYTES or blake3.blake3(data).digest() != digest:
            raise CallRefused(f"chunk {name} does not match its digest: it was damaged on the way; send it again")
        if self._sizes.get(name) == len(data):
            return 0
        self._disk.replace(self._chunks / name, data)
        with self._lock:
            self._sizes[name] = len(data)
        return len(data)

    def put_manifest(self, manifest: weights_pb2.Manifest) -> None:
        """Make a version visible, durably. Raises CallRefused while one of its chunks is missing."""
        missing = self.missing(manifest.chunks)
        version = Version.from_proto(manifest.version)
        if missing:
            raise CallRefused(f"version {version} lacks {len(missing)} of its {len(manifest.chunks)} chunks: send them")
        self._disk.replace(self._manifests / f"{version}.manifest", manifest.SerializeToString())
        with self._lock:
            self.manifests = {**self.manifests, version: manifest}

    def read_chunk(self, digest: bytes, offset: int, limit: int) -> bytes:
        """At most `limit` bytes of a chunk from `offset`. Raises ChunkGone, CallRefused."""
        name, size = digest.hex(), self._sizes.get(digest.hex())
        if size is None:
            raise ChunkGone(f"chunk {name} is not (or no longer) in the store: make a new plan")
        if not 0 <= offset <= size:
            raise CallRefused(f"chunk {name} has {size} bytes: an offset of {offset} lies outside")
        try:
            with open(self._chunks / name, "rb") as file:
                file.seek(offset)
                return file.read(limit)
        except FileNotFoundError as error:
            raise ChunkGone(f"chunk {name} was deleted: make a new plan") from error

    def pin(self, versions: Iterable[Version]) -> None:
        """A plan with these versions was given out: keep them for as long as it is good."""
        until = self._clock() + PLAN_GOOD_FOR_S
        with self._lock:
            self._pins |= dict.fromkeys(versions, until)

    def collect(self, valid: Sequence[Version]) -> list[Version]:
        """Delete what no plan needs: all before the `keep_anchors`-th newest anchor, and void versions.

        `valid` are the published versions that are not void. Pinned versions, and all that is needed to reach
        them, stay. Returns what was deleted.
        """
        with self._lock:
            keep = self._kept(sorted(version for version in valid if version in self.manifests))
            gone = [version for version in self.manifests if version not in keep]
            self.manifests = {version: self.manifests[version] for version in keep}
            used = {chunk.digest.hex() for manifest in self.manifests.values() for chunk in manifest.chunks}
            orphans = [name for name in self._sizes if name not in used] if gone else []
            for name in orphans:
                del self._sizes[name]
        for version in gone:
            (self._manifests / f"{version}.manifest").unlink(missing_ok=True)
        if orphans:  # power loss must not bring a manifest back without its chunks
            self._disk.sync_folder(self._manifests)
        for name in orphans:
            (self._chunks / name).unlink(missing_ok=True)
        return gone

    def _kept(self, valid: list[Version]) -> set[Version]:
        now = self._clock()
        self._pins = {version: until for version, until in self._pins.items() if until > now}
        anchors = [version for version in valid if self.manifests[version].anchor]
        if not anchors:
            return set(self.manifests)
        first = anchors[-self._keep_anchors] if len(anchors) >= self._keep_anchors else anchors[0]
        return {version for version in valid if version >= first} | (self._pins.keys() & self.manifests.keys())

    def _load(self) -> dict[Version, weights_pb2.Manifest]:
        found = {}
        for path in self._manifests.glob("*.manifest"):
            found[Version.parse(path.stem)] = weights_pb2.Manifest.FromString(path.read_bytes())
        for leftover in (*self._chunks.glob("*.tmp"), *self._manifests.glob("*.tmp")):
            os.unlink(leftover)
        return dict(sorted(found.items()))
