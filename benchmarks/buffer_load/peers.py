"""The peers: each in a virtual environment of its own, made when it is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.buffer_load.plan import Plan


def reverb(plan: Plan, folder: Path) -> dict[str, Any]:
    raise RuntimeError("not yet")


def transferqueue(plan: Plan, folder: Path) -> dict[str, Any]:
    raise RuntimeError("not yet")
