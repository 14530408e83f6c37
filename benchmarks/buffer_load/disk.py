"""What the disk under the buffer can do: the bare loop that a journal is at best."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path


def journal_mb_s(path: Path, *, record_bytes: int, records_a_sync: int, total_bytes: int) -> float:
    """Megabytes a second of appending records to a new file with an fdatasync after every few."""
    record = os.urandom(record_bytes)
    syncs = max(1, total_bytes // (record_bytes * records_a_sync))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        began = time.monotonic()
        for _ in range(syncs):
            _write_all(fd, [record] * records_a_sync)
            os.fdatasync(fd)
        seconds = time.monotonic() - began
    finally:
        os.close(fd)
        path.unlink()
    return syncs * records_a_sync * record_bytes / seconds / 1e6


def fdatasync_ms(path: Path, tries: int = 200) -> float:
    """Median milliseconds of appending 4 KiB to a file and syncing it."""
    record, seconds = os.urandom(4096), []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for _ in range(tries):
            began = time.monotonic()
            os.write(fd, record)
            os.fdatasync(fd)
            seconds.append(time.monotonic() - began)
    finally:
        os.close(fd)
        path.unlink()
    return 1e3 * statistics.median(seconds)


def _write_all(fd: int, parts: list[bytes]) -> None:
    wanted = sum(map(len, parts))
    if os.writev(fd, parts) != wanted:
        raise OSError(f"the disk took less than {wanted} bytes at once")
