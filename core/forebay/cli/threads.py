"""How many CPU threads a service's libraries start, and what those do while they wait."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def settle_threads(environ: MutableMapping[str, str], threads: int, accelerators: int) -> None:
    """Set what the user did not set; must come before torch is imported, which reads it once.

    Threads that wait sleep instead of spinning (two torch processes on two busy cores: 5 times slower and worse when
    they spin), and vLLM's are not bound to cores, so that whoever has work finds one.
    """
    if accelerators:
        return
    for variable in THREAD_VARIABLES:
        environ.setdefault(variable, str(threads))
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def settle_own_threads(wanted: int | None = None, *, alone: bool = False, processes: int = 1) -> None:
    """The same for this process and its children, on this machine.

    Unless `wanted` says how many, half the cores: a sampler and a learner on one machine each have their half. When
    both take all, every parallel region waits for a thread that has no core (SmolLM2 on two busy cores: 10 tokens/s
    with two threads, 140 with one). `alone`: nothing else computes meanwhile.
    `processes` that share what is left: the ranks of a learner.
    """
    accelerators = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]
    cores = len(os.sched_getaffinity(0))
    settle_threads(os.environ, wanted or max(1, (cores if alone else cores // 2) // processes), len(accelerators))
