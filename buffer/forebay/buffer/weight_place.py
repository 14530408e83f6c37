"""Where a weight store keeps its objects: a local folder, or any URL that fsspec or Arrow opens.

Names have one folder: `chunks/HEX`, `manifests/1.5.manifest`. A put is atomic everywhere: locally by rename, in an
object store by its nature.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

from forebay.buffer.disk import Disk
from forebay.buffer.errors import ReservoirError

A = TypeVar("A")

FOLDERS = ("chunks", "manifests")
#: An operation on a remote store that takes longer has failed; its caller tries again.
TIMEOUT_S = 30.0
_MOST_AT_ONCE = 16
_CACHE_BYTES = 128 << 20


class StoreTrouble(ReservoirError, OSError):
    """The weight store does not answer, or refuses. Nothing was made visible; the same call may succeed later."""


class Place(Protocol):
    """Objects by name. Methods block for a bounded time and raise OSError, FileNotFoundError for what is not there."""

    url: str

    @property
    def trouble(self) -> str:
        """What is wrong with the store just now, and since when; empty when nothing is."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Keep `data` under `name`, durably, all of it or nothing."""
        ...

    def get(self, name: str, offset: int = 0, limit: int | None = None) -> bytes:
        """At most `limit` bytes from `offset`."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of every whole object in `folder`, by its name without the folder."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Durably gone when this returns; those that are not there are passed over."""
        ...

    def settle(self) -> None:
        """Before the first put: make room, clear away what a crash left half-written."""
        ...


def url_of(store: str, run: str) -> str:
    """Where the run called `run` keeps its weights, in a store that several runs may share; "" for its own folder."""
    base, mark, settings = store.partition("?")
    return f"{base.rstrip('/')}/{run}{mark}{settings}" if store else ""


def place_at(url: str, folder: Path, disk: Disk) -> Place:
    """The place at `url`; `folder` when that is empty. Raises StoreTrouble."""
    if not url:
        return LocalPlace(folder, disk)
    if "://" not in url or url.startswith("file://"):
        return LocalPlace(Path(url.removeprefix("file://")), disk)
    return RemotePlace(url)


class LocalPlace:
    """A folder of this machine."""

    trouble = ""  #: a disk that fails ends the call with its own error

    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self.folder, self._disk, self.url = folder, disk or Disk(), str(folder)

    def settle(self) -> None:
        """Make the folders. A killed process may have left renames unsynced."""
        for name in FOLDERS:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            for leftover in (self.folder / name).glob("*.tmp"):
                leftover.unlink()
        for path in (self.folder, *(self.folder / name for name in FOLDERS)):
            self._disk.sync_folder(path)

    def put(self, name: str, data: bytes) -> None:
        """See Place."""
        self._disk.replace(self.folder / name, data)

    def get(self, name: str, offset: int = 0, limit: int | None = None) -> bytes:
        """See Place."""
        with open(self.folder / name, "rb") as file:
            file.seek(offset)
            return file.read(-1 if limit is None else limit)

    def sizes(self, folder: str) -> dict[str, int]:
        """See Place."""
        found = {}
        for path in sorted((self.folder / folder).glob("*")):
            with contextlib.suppress(FileNotFoundError):  # a running buffer deletes versions that nobody needs
                if path.suffix != ".tmp":
                    found[path.name] = path.stat().st_size
        return found

    def delete(self, names: Sequence[str]) -> None:
        """See Place."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        for folder in sorted({name.partition("/")[0] for name in names}):
            self._disk.sync_folder(self.folder / folder)


class RemotePlace:
    """An object store, by URL: `s3://bucket/prefix?region=…&endpoint_override=host:port`, `gs://…`, `memory://…`.

    S3 goes through Arrow's own client, which the base install has; credentials are taken from where AWS's tools take
    them. All else goes through fsspec and needs what fsspec needs for it. Objects never change, so those last used
    are kept in memory.
    """

    def __init__(self, url: str, *, filesystem: Any = None, timeout_s: float = TIMEOUT_S) -> None:
        """`filesystem` (fsspec's interface) takes the place of the one that `url` names. Raises StoreTrouble."""
        self.url, self._timeout_s = _shown(url), timeout_s
        self._slots = threading.Semaphore(_MOST_AT_ONCE)
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, bytes] = OrderedDict()
        self._cached_bytes = 0
        self._failing: tuple[float, str] | None = None
        self._fs, self._prefix = self._bounded("open", lambda: _open(url, filesystem))

    @property
    def trouble(self) -> str:
        """See Place."""
        failing = self._failing
        return f"{failing[1]} (since {time.monotonic() - failing[0]:.0f} s)" if failing else ""

    def settle(self) -> None:
        """See Place. Object stores have no folders and no half-written objects; others make folders here."""
        for name in FOLDERS:
            self._bounded("make folders", lambda name=name: self._fs.makedirs(f"{self._prefix}/{name}", exist_ok=True))  # type: ignore[misc]

    def put(self, name: str, data: bytes) -> None:
        """See Place."""
        self._bounded(f"put {name}", lambda: self._fs.pipe_file(f"{self._prefix}/{name}", data))
        self._keep(name, data)

    def get(self, name: str, offset: int = 0, limit: int | None = None) -> bytes:
        """See Place."""
        data = self._kept(name)
        if data is None:
            data = self._bounded(f"get {name}", lambda: bytes(self._fs.cat_file(f"{self._prefix}/{name}")))
            self._keep(name, data)
        return data[offset : None if limit is None else offset + limit]

    def sizes(self, folder: str) -> dict[str, int]:
        """See Place."""
        found = self._bounded(f"list {folder}", lambda: self._list(folder))
        return {name: size for name, size in sorted(found.items()) if not name.endswith(".tmp")}

    def delete(self, names: Sequence[str]) -> None:
        """See Place."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._bounded(f"delete {name}", lambda name=name: self._fs.rm_file(f"{self._prefix}/{name}"))  # type: ignore[misc]
            with self._lock:
                self._cached_bytes -= len(self._cached.pop(name, b""))

    def _list(self, folder: str) -> dict[str, int]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(f"{self._prefix}/{folder}", detail=True)
        except FileNotFoundError:
            return {}
        files = (entry for entry in entries if entry["type"] == "file")
        return {str(entry["name"]).rpartition("/")[2]: int(entry["size"]) for entry in files}

    def _kept(self, name: str) -> bytes | None:
        with self._lock:
            if name in self._cached:
                self._cached.move_to_end(name)
            return self._cached.get(name)

    def _keep(self, name: str, data: bytes) -> None:
        with self._lock:
            self._cached_bytes += len(data) - len(self._cached.pop(name, b""))
            self._cached[name] = data
            while self._cached_bytes > _CACHE_BYTES:
                self._cached_bytes -= len(self._cached.popitem(last=False)[1])

    def _bounded(self, what: str, work: Callable[[], A]) -> A:
        """What `work` gives, in at most the time allowed: a store that hangs must not hang those who ask it."""
        try:
            answer = self._in_thread(work)
        except FileNotFoundError:
            self._failing = None
            raise
        except Exception as error:
            raise self._failed(what, error) from error
        self._failing = None
        return answer

    def _in_thread(self, work: Callable[[], A]) -> A:
        if not self._slots.acquire(timeout=self._timeout_s):
            raise TimeoutError
        done: Future[A] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            finally:
                self._slots.release()

        threading.Thread(target=run, name="weight-store", daemon=True).start()
        return done.result(self._timeout_s)

    def _failed(self, what: str, error: Exception) -> StoreTrouble:
        told = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        why = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else told
        message = f"weight store {self.url}: {what}: {why}"
        self._failing = (self._failing[0] if self._failing else time.monotonic(), message)
        return StoreTrouble(message)


def _shown(url: str) -> str:
    """Without credentials, which may stand in a URL, and settings."""
    return re.sub(r"://[^/@]*@", "://", url.partition("?")[0]).rstrip("/")


def _open(url: str, filesystem: Any) -> tuple[Any, str]:
    """A file system with fsspec's interface, and the path in it."""
    import fsspec

    if filesystem is not None:
        return filesystem, url.partition("://")[2].rstrip("/")
    if url.startswith("s3://"):
        import pyarrow.fs
        from fsspec.implementations.arrow import ArrowFSWrapper

        one_put = f"{url}{'&' if '?' in url else '?'}allow_delayed_open=true"  # in place of a multipart upload each
        arrow, path = pyarrow.fs.FileSystem.from_uri(one_put)
        return ArrowFSWrapper(arrow), path.rstrip("/")
    opened, path = fsspec.core.url_to_fs(url)
    return opened, path.rstrip("/")
