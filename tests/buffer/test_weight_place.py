"""Where weights are kept: the same in a folder, in memory and in S3; a failing store ends calls in time, and tells."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from forebay.buffer.disk import Disk
from forebay.buffer.weight_key import Key, read_manifests
from forebay.buffer.weight_place import LocalPlace, Place, RemotePlace, StoreTrouble, place_at
from forebay.buffer.weight_store import WeightStore
from forebay.wire.version import Version
from tests.buffer.conftest import Serve
from tests.buffer.support import FakeClock, UnsyncedDisk, anchor, join_learner

#: An S3 server in an environment of its own, which `make test` makes.
MOTO = Path(__file__).parents[2] / ".peers" / "moto" / "bin" / "moto_server"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 server with the bucket `bucket`."""
    if not MOTO.exists():
        pytest.skip(f"no {MOTO}: `make test` could not install it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [MOTO, "-H", "127.0.0.1", "-p", address.rpartition(":")[2]]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _make_bucket(address, server)
            yield address
        finally:
            server.terminate()


def _make_bucket(address: str, server: subprocess.Popen[bytes]) -> None:
    request = urllib.request.Request(f"http://{address}/bucket", method="PUT")
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(request, timeout=10)
            return
        except urllib.error.URLError:
            assert server.poll() is None, "moto_server died"
            assert time.monotonic() < deadline, "moto_server does not answer"
            threading.Event().wait(0.1)


def s3_url(address: str, prefix: str) -> str:
    return f"s3://key:secret@bucket/{prefix}?endpoint_override={address}&scheme=http&region=us-east-1"


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind."""
    fresh = uuid.uuid4().hex
    if request.param == "s3":
        return s3_url(request.getfixturevalue("s3"), fresh)
    return f"memory://{fresh}/weights" if request.param == "memory" else str(tmp_path / "weights")


def opened(url: str) -> Place:
    return place_at(url, Path("/nowhere"), UnsyncedDisk())


def test_a_place_keeps_what_it_is_given(url: str) -> None:
    place = opened(url)
    place.settle()
    assert place.sizes("chunks") == {}
    place.put("chunks/aa", b"0123456789")
    place.put("chunks/bb", b"")
    place.put("manifests/1.0.manifest", b"m")
    for again in (place, opened(url)):
        assert again.sizes("chunks") == {"aa": 10, "bb": 0}
        assert (again.get("chunks/aa"), again.get("chunks/aa", 3, 4), again.get("chunks/aa", 8)) == (
            b"0123456789",
            b"3456",
            b"89",
        )
        assert again.sizes("manifests") == {"1.0.manifest": 1}
    place.put("chunks/aa", b"other")
    assert opened(url).get("chunks/aa") == b"other"
    place.delete(["chunks/aa", "chunks/not-there"])
    assert opened(url).sizes("chunks") == {"bb": 0}
    for missing in (place, opened(url)):
        with pytest.raises(FileNotFoundError):
            missing.get("chunks/aa")
    assert place.trouble == ""
    assert "secret" not in place.url


def test_a_store_is_found_again_in_any_place(url: str, tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "unused", place=opened(url), keep_anchors=1, clock=FakeClock())
    for step in (0, 1):
        encoded = anchor(Version(1, step), seed=step)
        for digest, data in encoded.chunks.items():
            assert store.put_chunk(digest, data) == len(data)
        store.put_manifest(encoded.manifest)
    again = WeightStore(tmp_path / "unused", place=opened(url), keep_anchors=1, clock=FakeClock())
    assert list(again.manifests) == [Key(Version(1, 0)), Key(Version(1, 1))]
    assert again.manifests == store.manifests
    assert again.stored_bytes == store.stored_bytes > 0
    assert again.collect([Version(1, 0), Version(1, 1)]) == [Version(1, 0)]
    assert list(read_manifests(opened(url))) == [Key(Version(1, 1))]
    chunk = encoded.manifest.chunks[0]
    assert list(opened(url).sizes("chunks")) == [chunk.digest.hex()]
    assert again.read_chunk(chunk.digest, 5, 7) == encoded.chunks[chunk.digest][5:12]
    assert (again.disk_bytes == 0) == isinstance(again.place, RemotePlace)


class Stuck(MemoryFileSystem):  # type: ignore[misc]
    """Does not answer a put until told."""

    cachable = False
    protocol = "stuck"

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.asked = threading.Event(), threading.Semaphore(0)

    def pipe_file(self, path: str, value: bytes, **options: object) -> None:
        self.asked.release()
        assert self.go_on.wait(60)
        super().pipe_file(path, value, **options)


def test_a_store_that_hangs_is_waited_for_only_so_long() -> None:
    stuck = Stuck()
    place = RemotePlace(f"memory://{uuid.uuid4().hex}", filesystem=stuck, timeout_s=0.2)
    began = time.monotonic()
    with pytest.raises(StoreTrouble, match=r"put chunks/a: no answer within 0\.2 s"):
        place.put("chunks/a", b"1")
    assert time.monotonic() - began < 5
    assert place.trouble.startswith(f"weight store {place.url}: put chunks/a: no answer within 0.2 s (since ")
    stuck.go_on.set()
    place.put("chunks/a", b"2")
    assert place.trouble == ""
    assert place.get("chunks/a") == b"2"


def test_hanging_calls_do_not_pile_up() -> None:
    place = RemotePlace(f"memory://{uuid.uuid4().hex}", filesystem=Stuck(), timeout_s=0.05)
    before = threading.active_count()
    for _ in range(20):
        with pytest.raises(StoreTrouble):
            place.put("chunks/a", b"1")
    assert threading.active_count() - before <= 16


def test_a_server_that_is_gone(s3: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        place = RemotePlace(s3_url(nobody, "p"), timeout_s=2.0)
        began = time.monotonic()
        with pytest.raises(StoreTrouble, match="weight store s3://bucket/p: list chunks: "):
            place.sizes("chunks")
        assert time.monotonic() - began < 10


def test_a_bucket_that_is_not_there(s3: str, tmp_path: Path) -> None:
    url = s3_url(s3, "p").replace("bucket", "no-such-bucket")
    with pytest.raises(StoreTrouble, match="weight store s3://no-such-bucket/p"):
        WeightStore(tmp_path, place=opened(url))


async def test_a_publication_waits_for_the_store_and_arrives(serve: Serve) -> None:
    stuck = Stuck()
    async with serve() as served, served.client() as learner:
        await join_learner(learner, served.run)
        store = served.reservoir.store
        store.place = RemotePlace(f"memory://{uuid.uuid4().hex}", filesystem=stuck, timeout_s=0.1)
        publishing = asyncio.create_task(learner.publish(anchor(Version(1, 1), seed=1)))
        for _ in range(2):  # when it is asked again, the first try has failed
            await asyncio.to_thread(stuck.asked.acquire)
        assert "no answer within 0.1 s" in store.place.trouble
        assert served.reservoir.state.newest == Version(1, 0)
        assert not publishing.done()
        stuck.go_on.set()
        assert await asyncio.wait_for(publishing, 30) >= 0
        assert served.reservoir.state.newest == Version(1, 1)


def test_local_places_sync_what_they_put_and_delete(tmp_path: Path) -> None:
    class Noting(Disk):
        """Writes down what it was asked to make durable."""

        def __init__(self) -> None:
            self.synced: list[str] = []

        def sync(self, fd: int) -> None:
            self.synced.append("file")

        def sync_folder(self, folder: Path) -> None:
            self.synced.append(folder.name)

    disk = Noting()
    place = LocalPlace(tmp_path / "w", disk)
    (tmp_path / "w" / "chunks").mkdir(parents=True)
    (tmp_path / "w" / "chunks" / "half.tmp").touch()
    place.settle()
    assert place.sizes("chunks") == {}
    assert not (tmp_path / "w" / "chunks" / "half.tmp").exists()
    assert disk.synced == ["w", "chunks", "manifests"]
    disk.synced.clear()
    place.put("chunks/a", b"1")
    assert disk.synced == ["file", "chunks"]
    disk.synced.clear()
    place.delete(["manifests/x"])
    assert disk.synced == ["manifests"]
