"""The run folder belongs to one buffer at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.errors import UsageError


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the buffer's folder for the time of the body. Raises UsageError when that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot keep the run here ({error.strerror}): set [run] folder to a place this user can write"
        ) from error
    try:
        _take(fd, folder)
        yield
    finally:
        os.close(fd)


def _take(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        raise UsageError(
            f"{folder}: another buffer (pid {holder}) serves this run: use it, or stop it first"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
