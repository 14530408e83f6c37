"""The run folder: everything this machine keeps of a run, marked as ours so that nothing else is ever removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from forebay.config.models import RunFile
from forebay.config.toml_text import toml_text
from forebay.errors import UsageError

MARKER = ".forebay"
RESOLVED = "resolved.toml"
OURS = frozenset(
    {MARKER, RESOLVED, "buffer", "learner", "reward", "samplers", "logs", "model", "plot.png", "summary.json"}
)


def prepare_home(run: RunFile) -> Path:
    """Make and mark the run folder. Raises UsageError when it cannot be written or holds something else."""
    home = run.run.home
    try:
        home.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(home)
        (home / MARKER).touch()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"run folder {home}: {reason.lower()}; set run.folder to a folder you can write to") from error
    if not os.access(home, os.W_OK | os.X_OK):
        raise UsageError(f"run folder {home}: permission denied; set run.folder to a folder you can write to")
    return home


def store_resolved(run: RunFile) -> Path:
    """Write the resolved run file into the run folder, whole or not at all; returns its path."""
    target = run.run.home / RESOLVED
    partial = target.with_name(f".{RESOLVED}.{os.getpid()}")
    partial.write_text(toml_text(run.model_dump(mode="json")), encoding="utf-8")
    partial.replace(target)
    return target


def clear_home(run: RunFile) -> None:
    """Remove what a run left, for a fresh start. Raises UsageError for a folder without forebay's marker."""
    home = run.run.home
    if not home.exists():
        return
    if not (home / MARKER).is_file():
        raise UsageError(f"run folder {home}: not made by forebay (no {MARKER} in it), so it is not removed")
    for entry in home.iterdir():
        if entry.name == MARKER:
            continue  # whoever holds its lock goes on holding it
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _refuse_foreign(home: Path) -> None:
    """A folder with other people's files must never get the marker: `--fresh` would remove them."""
    foreign = sorted(entry.name for entry in home.iterdir() if entry.name not in OURS)
    if foreign and not (home / MARKER).exists():
        shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise UsageError(f"run folder {home}: holds other files ({shown}); set run.folder to a new or empty folder")
