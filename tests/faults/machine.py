"""A machine that loses power: files as processes see them, and what of them is on the disk.

What is written is visible at once, to the process that wrote it and to the one that comes after it, but it is on the
disk only once synced: the bytes by `Disk.sync`, the names by `Disk.sync_folder`. `lose_power` takes the rest away, all
of it or, with `torn`, sector by sector and name by name as the dice fall.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from forebay.buffer.disk import Disk

_SECTOR = 512


class PowerLost(Exception):
    """The process is dead: whatever it still tries fails the same way."""


@dataclass(slots=True)
class _File:
    """`on_disk` are its synced bytes, `unsynced` the writes since; `fd` keeps the inode number from being reused."""

    fd: int
    on_disk: bytes
    unsynced: list[tuple[int, bytes, bool]] = field(default_factory=list)  #: offset, bytes, whether they may be torn


class Machine:
    """Everything below `root`. One process at a time uses it, through `boot`."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self.rng = root, rng
        self.lock = threading.RLock()
        self.operations = 0
        self.punches_tear = False  #: whether a hole may reach the disk in part
        self._files: dict[int, _File] = {}
        self._names: dict[Path, dict[str, int]] = {}  #: folder → name → inode, as on the disk
        self._settle_on_disk()

    def boot(self, crash_at: int | None = None, wait: Callable[[], None] = lambda: None) -> MachineDisk:
        """The disk for a new process, which dies at its `crash_at`-th operation; `wait` runs just before that."""
        return MachineDisk(self, crash_at, wait)

    def lose_power(self, *, torn: bool) -> None:
        """What is not synced is gone; with `torn`, some of it."""
        with self.lock:
            luck = self.rng.choice((0.1, 0.5, 0.9)) if torn else 0.0
            image = self._image(self.root, luck)
            shutil.rmtree(self.root)
            self._write(self.root, image)
            self._settle_on_disk()

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()

    # --- what the disk's operations do

    def written(self, fd: int, offset: int, data: bytes, *, tears: bool = True) -> None:
        """Bytes reached the file, not the disk."""
        self._file_of(fd).unsynced.append((offset, data, tears))

    def synced(self, fd: int) -> None:
        """The file's bytes and size reached the disk."""
        file = self._file_of(fd)
        file.on_disk, file.unsynced = _content(file.fd), []

    def folder_synced(self, folder: Path) -> None:
        """The folder's names reached the disk."""
        self._names[folder] = _names(folder)

    def _file_of(self, fd: int) -> _File:
        inode = os.fstat(fd).st_ino
        if inode not in self._files:
            kept = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            self._files[inode] = _File(fd=kept, on_disk=b"")
        return self._files[inode]

    # --- power

    def _settle_on_disk(self) -> None:
        """All that is there now is on the disk."""
        self.close()
        for folder, _, files in os.walk(self.root):
            self._names[Path(folder)] = _names(Path(folder))
            for name in files:
                fd = os.open(Path(folder) / name, os.O_RDONLY)
                self._files[os.fstat(fd).st_ino] = _File(fd=fd, on_disk=_content(fd))

    def _image(self, folder: Path, luck: float) -> dict[str, bytes | dict[str, object]]:
        """What is found in the folder after the power came back: bytes of files, contents of folders."""
        now, before = _names(folder), self._names.get(folder, {})
        image: dict[str, bytes | dict[str, object]] = {}
        for name in sorted(now.keys() | before.keys()):
            survives = now.get(name) == before.get(name) or self.rng.random() < luck
            inode = now.get(name) if survives else before.get(name)
            if inode is None:
                continue
            if (folder / name).is_dir():
                image[name] = self._image(folder / name, luck)  # type: ignore[assignment]
            else:
                image[name] = self._surviving(self._files.get(inode), luck)
        return image

    def _surviving(self, file: _File | None, luck: float) -> bytes:
        if file is None:  # made, but nothing was written
            return b""
        content = bytearray(file.on_disk)
        for offset, data, tears in file.unsynced:
            for start, piece in _sectors(offset, data) if tears else [(offset, data)]:
                if self.rng.random() < luck:
                    content.extend(bytes(max(0, start + len(piece) - len(content))))
                    content[start : start + len(piece)] = piece
        return bytes(content)

    def _write(self, folder: Path, image: dict[str, bytes | dict[str, object]]) -> None:
        folder.mkdir()
        for name, content in image.items():
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            else:
                self._write(folder / name, content)  # type: ignore[arg-type]


class MachineDisk(Disk):
    """The machine's disk in the hands of one process."""

    def __init__(self, machine: Machine, crash_at: int | None, wait: Callable[[], None]) -> None:
        self._machine, self._crash_at, self._wait = machine, crash_at, wait
        self._operations = 0
        self.dead = False

    def write(self, fd: int, parts: Sequence[bytes], offset: int) -> int:
        """Sometimes less than all; the write that kills the process gets somewhere, too."""
        data = b"".join(parts)
        dies = self._dies()
        with self._alive():
            if dies or self._machine.rng.random() < 0.1:
                data = data[: self._machine.rng.randint(0 if dies else 1, len(data))]
            written = super().write(fd, [data], offset)
            self._machine.written(fd, offset, data[:written])
            self._stop_if(dies)
        return written

    def sync(self, fd: int) -> None:
        """Whether the sync that kills the process was done is a matter of luck."""
        dies = self._dies()
        with self._alive():
            if not dies or self._machine.rng.random() < 0.5:
                self._machine.synced(fd)
            self._stop_if(dies)

    def sync_folder(self, folder: Path) -> None:
        """As `sync`."""
        dies = self._dies()
        with self._alive():
            if not dies or self._machine.rng.random() < 0.5:
                self._machine.folder_synced(folder)
            self._stop_if(dies)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        """Zeros, which reach the disk with the next sync."""
        if self._dies():
            self.kill()
        with self._alive():
            self._machine.written(fd, offset, bytes(length), tears=self._machine.punches_tear)
            return super().punch(fd, offset, length)

    def free_bytes(self, folder: Path) -> int:
        """Plenty."""
        return 1 << 40

    def kill(self) -> None:
        """The process is dead from here on."""
        with self._machine.lock:
            self.dead = True

    @contextmanager
    def _alive(self) -> Iterator[None]:
        with self._machine.lock:
            if self.dead:
                raise PowerLost
            yield

    def _dies(self) -> bool:
        """Count an operation; whether it is the last one. Raises PowerLost in a process that is dead."""
        with self._alive():
            self._operations += 1
            self._machine.operations += 1
            dies = self._operations == self._crash_at
        if dies:
            self._wait()
        return dies

    def _stop_if(self, dies: bool) -> None:
        if dies:
            self.dead = True
            raise PowerLost


def _names(folder: Path) -> dict[str, int]:
    if not folder.exists():
        return {}
    return {entry.name: entry.inode() for entry in os.scandir(folder)}


def _content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _sectors(offset: int, data: bytes) -> list[tuple[int, bytes]]:
    """The write's pieces, none of which crosses a sector's border."""
    cuts = [offset, *range(offset - offset % _SECTOR + _SECTOR, offset + len(data), _SECTOR), offset + len(data)]
    return [(start, data[start - offset : end - offset]) for start, end in itertools.pairwise(cuts) if end > start]
