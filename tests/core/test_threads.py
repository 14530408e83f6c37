"""Threads of the services' libraries."""

from __future__ import annotations

from forebay.cli.threads import settle_threads


def test_cpu_services_get_their_threads_and_do_not_spin() -> None:
    environ = {"OMP_NUM_THREADS": "1", "A": "b"}
    settle_threads(environ, threads=4, accelerators=0)
    assert environ == {
        "A": "b",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "4",
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def test_with_an_accelerator_threads_are_left_alone() -> None:
    environ: dict[str, str] = {}
    settle_threads(environ, threads=4, accelerators=1)
    assert environ == {}
