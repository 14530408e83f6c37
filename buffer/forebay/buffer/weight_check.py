"""Check a weight store on disk: every chunk against its digest. Reads only, beside a live buffer or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from forebay.buffer.weight_plan import cheapest_path
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
    problems: list[str] = field(default_factory=list)


def check_weights(folder: Path, newest: Version | None, newest_digest: bytes) -> WeightCheck:
    """Every manifest and every chunk under `folder`, and that the newest version can be reached."""
    found = WeightCheck()
    manifests = dict(_manifests(folder / "manifests", found))
    found.versions = len(manifests)
    sizes = {chunk.digest: chunk.bytes for manifest in manifests.values() for chunk in manifest.chunks}
    for path in sorted((folder / "chunks").glob("*")):
        if path.suffix != ".tmp":
            _check_chunk(path, sizes, found)
    for manifest_path, manifest in manifests.items():
        _check_present(folder / "chunks", manifest_path, manifest, found)
    overtaken = any(newest is None or Version.from_proto(one.version) > newest for one in manifests.values())
    if newest is not None and not overtaken and cheapest_path(manifests.values(), b"", newest_digest) is None:
        found.problems.append(f"{folder}: version {newest} was published, but no anchor leads to it: {REMEDY}")
    return found


def _manifests(folder: Path, found: WeightCheck) -> Iterator[tuple[Path, weights_pb2.Manifest]]:
    for path in sorted(folder.glob("*.manifest")):
        try:
            manifest = weights_pb2.Manifest.FromString(path.read_bytes())
            if str(Version.from_proto(manifest.version)) != path.stem:
                raise DecodeError("it names another version than its file")
            yield path, manifest
        except FileNotFoundError:
            continue  # a running buffer deletes versions that nobody needs
        except DecodeError as error:
            found.problems.append(f"{path}: not a manifest ({error}): {REMEDY}")


def _check_chunk(path: Path, sizes: dict[bytes, int], found: WeightCheck) -> None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    digest = digest_of(data)
    found.chunks, found.bytes = found.chunks + 1, found.bytes + len(data)
    if digest.hex() != path.name:
        found.problems.append(f"{path}: {len(data)} bytes whose blake3 is {digest.hex()}: damaged: {REMEDY}")
    elif sizes.get(digest, len(data)) != len(data):
        found.problems.append(f"{path}: {len(data)} bytes, but a manifest says {sizes[digest]}: {REMEDY}")


def _check_present(chunks: Path, path: Path, manifest: weights_pb2.Manifest, found: WeightCheck) -> None:
    missing = [chunk.digest.hex() for chunk in manifest.chunks if not (chunks / chunk.digest.hex()).exists()]
    if missing and path.exists():
        found.problems.append(f"{path}: {len(missing)} of its chunks are missing, the first is {missing[0]}: {REMEDY}")
