"""Run files for tests."""

from __future__ import annotations

from pathlib import Path

from forebay.config.load import load
from forebay.config.models import RunFile
from forebay.config.sources import Flag

SMALLEST = """\
[run]
name = "small"
[model]
path = "./model"
[task]
name = "jsonl:tasks.jsonl"
"""


def write(folder: Path, text: str = "", name: str = "run.toml") -> Path:
    """A run file with what must be there, and `text`."""
    path = folder / name
    path.write_text(SMALLEST + text)
    return path


def loaded(folder: Path, text: str = "", environ: dict[str, str] | None = None, **flags: str) -> RunFile:
    """Load it; flags as `learner__lr="1"`."""
    dotted = [(name.replace("__", "."), value) for name, value in flags.items()]
    given = [Flag(key=key, text=value, origin=f"--{key}") for key, value in dotted]
    return load([write(folder, text)], environ or {}, given)
