"""How many CPU threads the services' libraries start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def service_environment(environ: Mapping[str, str], cores: int, accelerators: int) -> dict[str, str]:
    """The environment of a service; what the user set stays.

    Without an accelerator, sampler and learner both compute on the CPU, and mostly one of them waits: each gets all
    cores, but its idle threads sleep instead of spinning, so that the other one can have them.
    """
    environment = {"PYTHONUNBUFFERED": "1", **environ}
    if accelerators == 0:
        for variable in THREAD_VARIABLES:
            environment.setdefault(variable, str(cores))
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return environment


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def count_accelerators() -> int:
    """NVIDIA and AMD devices, without loading a driver."""
    return len([*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")])
