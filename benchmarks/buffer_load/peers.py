"""The peers: each in a virtual environment of its own under `.peers/`, made when it is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.buffer_load.commands import ROOT
from benchmarks.buffer_load.plan import Plan

INSTALL_TIMEOUT_S, MEASURE_TIMEOUT_S = 1800.0, 600.0
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def reverb(plan: Plan, folder: Path) -> dict[str, Any]:
    """Reverb's figures, or `error`."""
    return _measure("reverb", plan)


def transferqueue(plan: Plan, folder: Path) -> dict[str, Any]:
    """TransferQueue's figures, or `error`."""
    return _measure("transferqueue", plan)


def _measure(name: str, plan: Plan) -> dict[str, Any]:
    try:
        python = _environment(name, ROOT / "benchmarks" / f"peer_{name}.txt")
        words = [str(python), "-m", f"benchmarks.peer_{name}", f"--seconds={plan.peer_s}"]
        words += ["--thorough"] if plan.rounds > 1 else []
        told = _run(words, MEASURE_TIMEOUT_S)
        figures: dict[str, Any] = json.loads(told.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, LookupError) as error:
        return {"error": f"{name} could not be measured: {_reason(error)}"}
    return figures


def _environment(name: str, requirements: Path) -> Path:
    """The interpreter of the peer's environment, which holds what `requirements` pins; made anew when that changed."""
    home = ROOT / ".peers" / name
    python, done = home / "bin" / "python", home / "installed.txt"
    wanted = requirements.read_text(encoding="utf-8")
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return python
    print(f"buffer: installing {name} (some minutes, the first time)", file=sys.stderr, flush=True)
    shutil.rmtree(home, ignore_errors=True)
    _run([_base_python(), "-m", "venv", str(home)], INSTALL_TIMEOUT_S)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for torch in (line for line in wanted.splitlines() if line.startswith("torch==")):
        _install_torch(install, torch)
    _run([*install, "-r", str(requirements)], INSTALL_TIMEOUT_S)
    done.write_text(wanted, encoding="utf-8")
    return python


def _install_torch(install: list[str], torch: str) -> None:
    """Plain first: some machines have the wheel at hand; elsewhere it comes from PyTorch's own index."""
    try:
        _run([*install, "--no-deps", torch], INSTALL_TIMEOUT_S)
    except subprocess.CalledProcessError:
        _run([*install, "--no-deps", torch, "--index-url", TORCH_INDEX], INSTALL_TIMEOUT_S)


def _base_python() -> str:
    """Python 3.11, the newest that both peers run on."""
    return shutil.which("python3.11") or sys.executable


def _run(words: list[str], timeout_s: float) -> str:
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=timeout_s
    )
    done.check_returncode()
    return done.stdout


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or error.stdout or "").strip().splitlines()
        return f"{' '.join(map(str, error.cmd[:4]))} ended with {error.returncode}: {said[-1] if said else 'no word'}"
    return f"{type(error).__name__}: {error}"
