"""Work on many blocks at once: the loops and zstd hold no lock of the interpreter, so threads do."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

_MOST_THREADS = 8  #: beyond them memory is the bound
_BATCH_BYTES = 1 << 21


def threads() -> int:
    """How many are used: the cores that this process may run on, within reason."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def in_order(work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
    """The results of all jobs, in their order; a few jobs ahead of the caller at most, so that memory is bounded."""
    waiting = iter(jobs)
    running = deque[Future[Result]]()
    try:
        running.extend(_pool().submit(work, job) for job in islice(waiting, 2 * threads()))
        while running:
            result = running.popleft().result()
            running.extend(_pool().submit(work, job) for job in islice(waiting, 1))
            yield result
    finally:  # nobody may still write into memory that the caller takes back after an error, of `jobs` too
        for future in running:
            if not future.cancel():
                future.exception()


def batched(jobs: Iterable[Job], size: Callable[[Job], int]) -> Iterator[list[Job]]:
    """Small jobs together, so that what a thread is asked costs little beside what it does."""
    batch: list[Job] = []
    held = 0
    for job in jobs:
        batch.append(job)
        held += size(job)
        if held >= _BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(), thread_name_prefix="weights")
