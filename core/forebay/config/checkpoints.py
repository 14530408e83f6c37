"""Where a run folder keeps its checkpoints, for whoever must not import the learner."""

from __future__ import annotations

from pathlib import Path


def folder_of(home: Path) -> Path:
    """The folder with all of a run's checkpoints."""
    return home / "learner" / "checkpoints"


def name_of(step: int) -> str:
    """What the checkpoint of a step is called there."""
    return f"step_{step:06d}"


def complete_steps(home: Path) -> list[int]:
    """Steps that have a complete checkpoint, ascending."""
    found = folder_of(home).glob("step_*/trainer/state.json")
    return sorted(int(path.parents[1].name.removeprefix("step_")) for path in found)
