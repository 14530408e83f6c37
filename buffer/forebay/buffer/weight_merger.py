"""Merged deltas: shortcuts over 8 and 64 publications for those who are behind, made behind the learner's back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from forebay.buffer.errors import CallRefused
from forebay.buffer.weight_key import Key
from forebay.buffer.weight_plan import NOTHING, cheapest_path
from forebay.buffer.weight_store import WeightStore
from forebay.errors import ForebayError
from forebay.wire.merge import CannotMerge, Delta, merge, payload_reader
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version

log = logging.getLogger(__name__)


class Merger:
    """Makes the shortcuts that end at a version. They start at every 8th (64th) version after an anchor, so that they
    join one another, and a longer one is merged from shorter ones."""

    def __init__(self, store: WeightStore, lengths: Sequence[int], stopped: Callable[[], bool]) -> None:
        """`lengths` are numbers of deltas; `stopped` is asked now and then, so that no shutdown waits for a merge."""
        self._store, self._lengths, self._stopped = store, sorted(set(lengths)), stopped
        self._tried = set[Key]()  #: that are smaller in pieces, or cannot be merged

    def work(self, newest: Version) -> list[Key]:
        """Make what is missing on the chain that leads to `newest`; what was made. Blocks; raises nothing."""
        made = []
        for key in self._due(newest):
            try:
                self._tried.add(key)
                if self._make(key):
                    made.append(key)
            except _Stopped:
                break
            except (CannotMerge, CallRefused) as error:
                log.info("no shortcut from version %s to %s: %s", key.base, key.version, error)
            except (ForebayError, OSError) as error:
                self._tried.discard(key)
                log.warning("no shortcut from version %s to %s: %s", key.base, key.version, error)
        return made

    def _due(self, newest: Version) -> Iterator[Key]:
        chain = self._chain(newest)
        self._tried.intersection_update({key for key in self._tried if Key(key.version) in self._store.manifests})
        for length in self._lengths:
            for base, target in pairwise(chain[::length]):
                key = Key(Version.from_proto(target.version), Version.from_proto(base.version))
                if key not in self._tried and key not in self._store.manifests:
                    yield key

    def _chain(self, newest: Version) -> list[weights_pb2.Manifest]:
        """The published manifests from the last anchor on, or from the oldest that is left, to `newest`."""
        chain, manifests = list[weights_pb2.Manifest](), self._store.manifests
        manifest = manifests.get(Key(newest))
        while manifest is not None:
            chain.append(manifest)
            base = Key(Version.from_proto(manifest.base)) if not manifest.anchor else None
            manifest = manifests.get(base) if base else None
        return chain[::-1] if chain and chain[-1].anchor else []

    def _make(self, key: Key) -> bool:
        base, target = self._store.published(key.base or key.version), self._store.published(key.version)
        if base is None or target is None:
            return False
        deltas = [manifest for manifest in self._store.manifests.values() if not manifest.anchor]
        path = cheapest_path(deltas, base.digest, target.digest)
        if path is None or len(path) < 2:
            return False
        behind = cheapest_path(self._store.manifests.values(), NOTHING, base.digest) or []
        self._store.pin([*behind, *path])
        merged = merge(self._deltas(path), self._deltas(behind))
        merged.manifest.base.CopyFrom(base.version)
        merged.manifest.version.CopyFrom(target.version)
        if merged.manifest.payload_bytes >= sum(manifest.payload_bytes for manifest in path):
            return False
        self._store.put_merged(merged)
        return True

    def _deltas(self, path: Sequence[weights_pb2.Manifest]) -> list[Delta]:
        return [Delta(manifest=manifest, read=payload_reader(manifest, self._read)) for manifest in path]

    def _read(self, digest: bytes, offset: int, limit: int) -> bytes:
        if self._stopped():
            raise _Stopped("the buffer stops")
        return self._store.read_chunk(digest, offset, limit)


class _Stopped(Exception):
    """Asked to stop in the middle."""
