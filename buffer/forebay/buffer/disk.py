"""The few file operations whose failure the buffer must survive, in one place so that tests can make them fail."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

_PUNCH_HOLE_KEEP_SIZE = 0x01 | 0x02
_libc = ctypes.CDLL(None, use_errno=True)


class Disk:
    """The real disk."""

    def write(self, fd: int, parts: Sequence[bytes], offset: int) -> int:
        """Write `parts` one after the other at `offset`; how many bytes got there. Raises OSError."""
        return os.pwritev(fd, parts, offset)

    def sync(self, fd: int) -> None:
        """Return when the file's bytes and size are on the disk. Raises OSError."""
        os.fdatasync(fd)

    def sync_folder(self, folder: Path) -> None:
        """Return when the folder's entries are on the disk. Raises OSError."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_parents(self, folder: Path, levels: int) -> None:
        """Return when the names of `folder` and of `levels` - 1 folders above it are on the disk. Raises OSError."""
        for parent in list(folder.parents)[:levels]:
            with contextlib.suppress(PermissionError):  # where nobody may look, this user made nothing
                self.sync_folder(parent)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        """Give the range back to the file system, which then reads as zeros; False where that is not supported."""
        fallocate = getattr(_libc, "fallocate", None)
        if fallocate is None:
            return False
        done = fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(length))
        return bool(done == 0)

    def free_bytes(self, folder: Path) -> int:
        """Room left on the file system of `folder`."""
        stat = os.statvfs(folder)
        return stat.f_bavail * stat.f_frsize

    def replace(self, path: Path, content: bytes) -> None:
        """Make `path` hold `content`, atomically and durably. Raises OSError."""
        temporary = path.with_name(path.name + ".tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(self, fd, [content], 0)
            self.sync(fd)
        finally:
            os.close(fd)
        temporary.rename(path)
        self.sync_folder(path.parent)


def write_all(disk: Disk, fd: int, parts: Sequence[bytes], offset: int) -> None:
    """Write every byte of `parts` at `offset`, however many calls it takes. Raises OSError."""
    rest = [part for part in parts if part]
    while rest:
        written = disk.write(fd, rest, offset)
        if written <= 0:
            raise OSError(errno.EIO, "the disk took no bytes")
        offset += written
        rest = _after(rest, written)


def _after(parts: list[bytes], written: int) -> list[bytes]:
    for index, part in enumerate(parts):
        if written < len(part):
            return [part[written:], *parts[index + 1 :]]
        written -= len(part)
    return []
