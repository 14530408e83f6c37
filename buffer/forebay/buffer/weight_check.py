"""Check a weight store: every chunk against its digest. Reads only, beside a live buffer or not."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from forebay.buffer.disk import Disk
from forebay.buffer.weight_key import FOLDER, Key, read_manifest
from forebay.buffer.weight_place import LocalPlace, Place, place_at, url_of
from forebay.buffer.weight_plan import cheapest_path
from forebay.config.home import RESOLVED
from forebay.wire.digest import digest_of
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version

REMEDY = "start the learner again: its next anchor is whole, and samplers take that"


@dataclass(slots=True)
class WeightCheck:
    """What was found. `problems` are whole sentences: file, what is wrong, what to do."""

    versions: int = 0
    chunks: int = 0
    bytes: int = 0
    manifests: dict[Key, weights_pb2.Manifest] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def place_of(home: Path) -> Place:
    """Where the run in the folder `home` keeps its weights, as the run file that it was last served with says."""
    resolved = home / RESOLVED
    settings = tomllib.loads(resolved.read_text()) if resolved.is_file() else {}
    url = url_of(settings.get("publish", {}).get("store", ""), settings.get("run", {}).get("name", ""))
    return place_at(url, home / "buffer" / "weights", Disk())


def check_weights(folder: Path | Place, newest: Version | None, newest_digest: bytes) -> WeightCheck:
    """Every manifest and every chunk under `folder`, and that the newest version can be reached."""
    place = LocalPlace(folder) if isinstance(folder, Path) else folder
    found = check_place(place)
    manifests = found.manifests
    overtaken = any(newest is None or key.version > newest for key in manifests)
    if newest is not None and not overtaken and cheapest_path(manifests.values(), b"", newest_digest) is None:
        found.problems.append(f"{place.url}: version {newest} was published, but no anchor leads to it: {REMEDY}")
    return found


def check_place(place: Place) -> WeightCheck:
    """Every manifest and every chunk of a store. Raises StoreTrouble when it does not answer."""
    found = WeightCheck()
    found.manifests = dict(_manifests(place, found))
    found.versions = len({key.version for key in found.manifests})
    sizes = {chunk.digest: chunk.bytes for manifest in found.manifests.values() for chunk in manifest.chunks}
    there = place.sizes("chunks").keys()
    for name in there:
        _check_chunk(place, name, sizes, found)
    for key, manifest in found.manifests.items():
        _check_present(place, key, manifest, there, found)
    return found


def _manifests(place: Place, found: WeightCheck) -> Iterator[tuple[Key, weights_pb2.Manifest]]:
    for name in place.sizes(FOLDER):
        try:
            yield read_manifest(place, name)
        except FileNotFoundError:
            continue  # a running buffer deletes versions that nobody needs
        except DecodeError as error:
            found.problems.append(f"{place.url}/{FOLDER}/{name}: not a manifest ({error}): {REMEDY}")


def _check_chunk(place: Place, name: str, sizes: dict[bytes, int], found: WeightCheck) -> None:
    path = f"{place.url}/chunks/{name}"
    try:
        data = place.get(f"chunks/{name}")
    except FileNotFoundError:
        return
    digest = digest_of(data)
    found.chunks, found.bytes = found.chunks + 1, found.bytes + len(data)
    if digest.hex() != name:
        found.problems.append(f"{path}: {len(data)} bytes whose blake3 is {digest.hex()}: damaged: {REMEDY}")
    elif sizes.get(digest, len(data)) != len(data):
        found.problems.append(f"{path}: {len(data)} bytes, but a manifest says {sizes[digest]}: {REMEDY}")


def _check_present(
    place: Place, key: Key, manifest: weights_pb2.Manifest, there: Collection[str], found: WeightCheck
) -> None:
    missing = [chunk.digest.hex() for chunk in manifest.chunks if chunk.digest.hex() not in there]
    if missing and key.name.partition("/")[2] in place.sizes(FOLDER):  # else deleted meanwhile
        found.problems.append(
            f"{place.url}/{key.name}: {len(missing)} of its chunks are missing, the first is {missing[0]}: {REMEDY}"
        )
