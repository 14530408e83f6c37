"""`forebay weights ls | verify | export`: published weights where they are kept, with a buffer running or without."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import Subparsers, add_command, run_flags
from forebay.errors import EXIT_DONE, EXIT_FAILED, UsageError

if TYPE_CHECKING:
    from forebay.buffer.weight_key import Key
    from forebay.buffer.weight_place import Place
    from forebay.config.models import RunFile
    from forebay.wire.v1 import weights_pb2


def add(subparsers: Subparsers) -> None:
    """The command and its parts."""
    parser = subparsers.add_parser(
        "weights",
        help="list, check or export published weights",
        description="Published weights, where they are kept. A running buffer is neither needed nor disturbed.",
        epilog="example:\n  forebay weights export 1.40 runs/quickstart --into step-40",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts: Subparsers = parser.add_subparsers(title="parts", metavar="PART", required=True)
    listing = add_command(
        parts,
        "ls",
        ls,
        summary="every stored version and how it is stored",
        example="forebay weights ls runs/quickstart",
    )
    listing.add_argument("--json", action="store_true", help="print one JSON object a line")
    verifying = add_command(
        parts,
        "verify",
        verify,
        summary="check every chunk, then make every version again and prove it; exit code 1 if one is damaged",
        example="forebay weights verify run.toml",
    )
    exporting = add_command(
        parts,
        "export",
        export,
        summary="write a version as an ordinary checkpoint folder, in the dtype it was published in",
        example="forebay weights export 1.40 runs/quickstart --into step-40",
    )
    exporting.add_argument("version", metavar="VERSION", help="INCARNATION.STEP, as `forebay weights ls` shows it")
    exporting.add_argument("--into", type=Path, metavar="DIR", help="the new folder; default RUN-VERSION")
    for each in (listing, verifying, exporting):
        each.add_argument("where", metavar="RUN", help="run.toml, the run folder, or the URL that holds its weights")


def ls(arguments: argparse.Namespace) -> int:
    """Print the table. Raises UsageError, StoreTrouble."""
    rows = [_facts(key, manifest) for key, manifest in _manifests(_find(arguments).place).items()]
    if arguments.json:
        print("\n".join(json.dumps(row) for row in rows))
    else:
        _print(rows)
    return EXIT_DONE


def verify(arguments: argparse.Namespace) -> int:
    """Print one line a manifest and a verdict. Raises UsageError, StoreTrouble."""
    from forebay.buffer.weight_check import check_place
    from forebay.buffer.weight_replay import Replay

    place = _find(arguments).place
    found = check_place(place)
    problems = list(found.problems)
    _require_some(place, found.manifests or problems)
    for key, problem in Replay(place, found.manifests).prove():
        name = f"{key.version} from {key.base}" if key.base else str(key.version)
        print(f"{name}: {problem or 'proved'}")
        problems += [f"{name}: {problem}"] if problem else []
    for problem in found.problems:
        print(problem)
    verdict = f"DAMAGED, {len(problems)} found" if problems else "whole"
    print(f"{place.url}: {found.versions} versions, {found.chunks} chunks, {found.bytes} bytes: {verdict}")
    return EXIT_FAILED if problems else EXIT_DONE


def export(arguments: argparse.Namespace) -> int:
    """Write the folder. Raises UsageError, VersionUnreachable, CorruptWeights."""
    from forebay.buffer.weight_export import export as write
    from forebay.buffer.weight_export import refuse_existing
    from forebay.buffer.weight_replay import Replay
    from forebay.wire.version import Version

    try:
        version = Version.parse(arguments.version)
    except ValueError as error:
        raise UsageError(f"version {arguments.version}: expected INCARNATION.STEP, such as 1.40") from error
    found = _find(arguments)
    into: Path = arguments.into or Path(f"{found.name}-{version}")
    refuse_existing(into)
    manifests, adapter = _manifests(found.place), found.adapter()
    if adapter is None and any(key.version == version and one.model_digest for key, one in manifests.items()):
        raise UsageError(
            f"version {version} is an adapter, and how it is added to its model stands in the run file: "
            "name that, or the run's folder, instead of the store"
        )
    weights = Replay(found.place, manifests).weights_of(version)
    model, tokenizer = found.beside()
    files = write(weights, into, model, tokenizer, adapter)
    print(f"{into}: version {version}, {weights.model_bytes} bytes of weights; {', '.join(files)}")
    if not {"config.json", "adapter_config.json"} & set(files):
        print(f"{into}: without configuration and tokenizer, for the run's model is not known here: copy them yourself")
    return EXIT_DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A run's weights; `run` when its run file is known."""

    place: Place
    name: str
    run: RunFile | None = None

    def beside(self) -> tuple[Path | None, Path | None]:
        """The folders of the run's model and tokenizer, where they are on this machine."""
        if self.run is None:
            return None, None
        model = self.run.model
        return _model_folder(model.path), _model_folder(model.tokenizer or model.path)

    def adapter(self) -> dict[str, Any] | None:
        """What peft should know of the adapter that a run trains instead of its model."""
        if self.run is None or self.run.learner.lora is None:
            return None
        return self.run.learner.lora.peft_settings(self.run.model.path)


def _model_folder(path: str) -> Path | None:
    """A checkpoint folder, or where the hub's cache has the model of that name."""
    if Path(path).is_dir():
        return Path(path)
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    try:
        config = importlib.import_module("huggingface_hub").try_to_load_from_cache(path, "config.json")
    except ValueError:  # not a name that a hub could have
        return None
    return Path(config).parent if isinstance(config, str) else None


def _find(arguments: argparse.Namespace) -> _Found:
    """The weights that a command line means. Raises UsageError."""
    from forebay.buffer.disk import Disk
    from forebay.buffer.weight_place import LocalPlace, place_at, url_of
    from forebay.config.home import RESOLVED
    from forebay.config.load import load

    given = str(arguments.where)
    path = Path(given)
    if "://" in given:
        return _Found(place=place_at(given, path, Disk()), name=given.partition("?")[0].rstrip("/").rpartition("/")[2])
    if path.is_dir() and (path / "manifests").is_dir():
        return _Found(place=LocalPlace(path), name=path.resolve().name)
    if path.is_dir() and not (path / RESOLVED).is_file():
        raise UsageError(f"{path}: no run folder ({RESOLVED} is missing); expected run.toml, a run folder or a URL")
    run = load([path / RESOLVED if path.is_dir() else path], os.environ, run_flags(arguments))
    home = path if path.is_dir() else run.run.home
    url = url_of(run.publish.store, run.run.name)
    return _Found(place=place_at(url, home / "buffer" / "weights", Disk()), name=run.run.name, run=run)


def _manifests(place: Place) -> dict[Key, weights_pb2.Manifest]:
    from google.protobuf.message import DecodeError

    from forebay.buffer.weight_key import read_manifests
    from forebay.wire.errors import CorruptWeights

    try:
        manifests = read_manifests(place)
    except DecodeError as error:
        raise CorruptWeights(f"{place.url}: damaged ({error}); `forebay weights verify` says more") from error
    _require_some(place, manifests)
    return manifests


def _require_some(place: Place, what: object) -> None:
    if not what:
        raise UsageError(f"{place.url}: no weights here; expected those of a run that has published some")


def _facts(key: Key, manifest: weights_pb2.Manifest) -> dict[str, Any]:
    """One row: what a manifest says of itself."""
    from forebay.wire.version import Version

    return {
        "version": str(key.version),
        "kind": "anchor" if manifest.anchor else "merged" if key.base else "delta",
        "base": "" if manifest.anchor else str(Version.from_proto(manifest.base)),
        "bytes": manifest.payload_bytes,
        "model_bytes": manifest.model_bytes,
        "changed_share": manifest.changed / max(manifest.elements, 1),
        "codec": " ".join(_codecs(manifest)),
        "digest": manifest.digest.hex(),
    }


def _codecs(manifest: weights_pb2.Manifest) -> Iterator[str]:
    """Codecs by their share of the bytes, the largest first."""
    sizes: dict[str, int] = {}
    for entry in manifest.tensors:
        sizes[entry.codec] = sizes.get(entry.codec, 0) + entry.bytes
    for codec, size in sorted(sizes.items(), key=lambda item: -item[1]):
        share = 100 * size / max(manifest.payload_bytes, 1)
        yield codec if len(sizes) == 1 else f"{codec} {share:.0f}%"


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("version", "kind", "base"):
        table.add_column(column)
    for column in ("bytes", "smaller", "changed"):
        table.add_column(column, justify="right")
    for column in ("codec", "digest"):
        table.add_column(column)
    for row in rows:
        smaller = f"{row['model_bytes'] / row['bytes']:.1f} x" if row["bytes"] else "–"
        numbers = (str(row["bytes"]), smaller, f"{100 * row['changed_share']:.2f} %")
        table.add_row(row["version"], row["kind"], row["base"] or "–", *numbers, row["codec"], row["digest"][:12])
    Console(highlight=False).print(table)
