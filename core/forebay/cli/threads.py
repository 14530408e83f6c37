"""How many CPU threads a service's libraries start, and what those do while they wait."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def settle_threads(environ: MutableMapping[str, str], cores: int, accelerators: int) -> None:
    """Set what the user did not set; must come before torch is imported, which reads it once.

    Without an accelerator, sampler and learner both compute on the CPU, and mostly one of them waits: each gets all
    cores, but its idle threads sleep instead of spinning, so that the other one can have them. (Two torch processes on
    two busy cores: 5 times slower and worse when they spin.)
    """
    if accelerators:
        return
    for variable in THREAD_VARIABLES:
        environ.setdefault(variable, str(cores))
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def settle_own_threads() -> None:
    """The same for this process and its children, on this machine."""
    accelerators = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]
    settle_threads(os.environ, len(os.sched_getaffinity(0)), len(accelerators))
