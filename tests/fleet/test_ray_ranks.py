"""The ranks of a learner on a real Ray cluster of two nodes, both on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]

LAUNCH = """
import sys
from forebay.fleet.ray_ranks import run_ranks_on_ray
sys.exit(run_ranks_on_ray(sys.argv[2:], int(sys.argv[1]), cpus=1))
"""
#: A rank that says what it is, and then does as the words of its number tell it.
RANK = """
import json, os, pathlib, sys, time
rank = int(os.environ["RANK"])
told = {name: value for name, value in os.environ.items() if name.endswith(("RANK", "WORLD_SIZE")) or "MASTER" in name}
path = pathlib.Path(sys.argv[1]) / f"{rank}.json"
path.with_suffix(".making").write_text(json.dumps({**told, "pid": os.getpid(), "cwd": os.getcwd()}))
path.with_suffix(".making").rename(path)
what = sys.argv[2 + rank]
if what == "wait":
    time.sleep(600)
sys.exit(int(what))
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster whose two nodes have room for a rank each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


def launched(address: str, count: int, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(count), *words],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": address},
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code, and what it said on standard error."""
    _, told = process.communicate(timeout=DEADLINE_S)
    return process.returncode, told


def started(folder: Path, count: int = 2) -> list[dict[str, str]]:
    """What the ranks say that they are, once all have said it."""
    paths, until = [folder / f"{rank}.json" for rank in range(count)], time.monotonic() + DEADLINE_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, "not all ranks were started"
        time.sleep(0.05)  # other processes work: there is nothing to be notified by
    return [json.loads(path.read_text()) for path in paths]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_gone(ranks: list[dict[str, str]]) -> None:
    until = time.monotonic() + DEADLINE_S
    while any(is_there(int(rank["pid"])) for rank in ranks):
        assert time.monotonic() < until, "a rank was left behind"
        time.sleep(0.05)


def test_each_knows_what_it_is(address: str, tmp_path: Path) -> None:
    assert ended(launched(address, 2, "-c", RANK, str(tmp_path), "0", "0"))[0] == 0
    ranks = started(tmp_path)
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    assert {(rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["LOCAL_RANK"]) for rank in ranks} == {("2", "1", "0")}
    assert len({(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks}) == 1
    assert {rank["cwd"] for rank in ranks} == {str(ROOT)}


def test_when_one_fails_all_end(address: str, tmp_path: Path) -> None:
    assert ended(launched(address, 2, "-c", RANK, str(tmp_path), "3", "wait"))[0] == 3
    assert_gone(started(tmp_path))


def test_when_an_actor_is_killed_all_end(address: str, tmp_path: Path) -> None:
    process = launched(address, 2, "-c", RANK, str(tmp_path), "wait", "wait")
    ranks = started(tmp_path)
    actor = int(Path(f"/proc/{ranks[0]['pid']}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    code, told = ended(process)
    assert code == 128 + signal.SIGKILL
    assert "a rank is lost" in told
    assert_gone(ranks)


def test_killed_itself_it_leaves_no_rank_behind(address: str, tmp_path: Path) -> None:
    process = launched(address, 2, "-c", RANK, str(tmp_path), "wait", "wait")
    ranks = started(tmp_path)
    process.kill()
    ended(process)
    assert_gone(ranks)


def test_a_request_to_stop_reaches_every_rank(address: str, tmp_path: Path) -> None:
    process = launched(address, 2, "-c", RANK, str(tmp_path), "wait", "wait")
    ranks = started(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 128 + signal.SIGTERM, "as these ranks end of it, which do not know it"
    assert_gone(ranks)


def test_what_it_waits_for_is_named(address: str, tmp_path: Path) -> None:
    process = launched(address, 3, "-c", RANK, str(tmp_path), "0", "0", "0")
    assert process.stderr is not None
    told = next(line for line in process.stderr if "waiting" in line)
    assert "room for 3 ranks of 1 CPU in a Ray cluster with" in told
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 0


@pytest.mark.parametrize("where", ["127.0.0.1:1", "nonsense"])
def test_without_a_cluster_it_says_what_to_do(where: str) -> None:
    _, told = ended(launched(where, 2, "-c", ""))
    assert f'UsageError: learner.launcher is "ray", but no cluster answers at {where} ' in told.splitlines()[-1]
