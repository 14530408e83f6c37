"""`forebay reward` as people and supervisors meet it: a process, its exit codes, its signals, its lines."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.reward.client import RewardModelClient
from tests.core.run_files import write
from tests.end_to_end.shells import ROOT, free_ports
from tests.reward import models

DEADLINE_S = 120.0
pytestmark = pytest.mark.end_to_end


class Place:
    """A folder with a model, a run file, and `forebay reward` on it."""

    def __init__(self, folder: Path) -> None:
        grpc, http = free_ports(2)
        self.folder, self.address, self.http = folder, f"127.0.0.1:{grpc}", f"127.0.0.1:{http}"
        models.llama(folder / "reward")
        self.started: list[subprocess.Popen[str]] = []

    def write(self, **changes: str) -> Path:
        """The run file; `changes` are settings of the model, as TOML."""
        settings = {"path": f'"{self.folder / "reward"}"', "address": f'"{self.address}"', "http": f'"{self.http}"'}
        lines = [f"{key} = {value}" for key, value in (settings | changes).items()]
        return write(self.folder, "\n".join(["[reward.models.m]", *lines]))

    def start(self, *words: str) -> subprocess.Popen[str]:
        """`forebay reward run.toml WORDS`."""
        command = [sys.executable, "-m", "forebay.cli.main", "reward", "run.toml", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, cwd=self.folder, env=environment, stderr=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def refused(self, *words: str) -> str:
        """What it says when it will not start."""
        process = self.start(*words)
        _, told = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 2, told
        return told.splitlines()[-1]

    def get(self, path: str) -> tuple[int, str]:
        """From the service's HTTP address."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=5.0) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


async def test_it_serves_is_healthy_counts_and_drains(place: Place) -> None:
    place.write()
    process = place.start()
    client = RewardModelClient("m", place.address, timeout_s=5.0, patience_s=5.0)
    async with asyncio.timeout(DEADLINE_S):
        await client.ready()
        scores = await client.score("", "37+58=", ["95", "96"])
        again = await client.score("", "37+58=", ["95"])
    assert scores[0] != scores[1]
    assert again == pytest.approx(scores[:1], abs=1e-5)
    assert await asyncio.to_thread(place.get, "/readyz") == (200, "ready\n")
    _, metrics = await asyncio.to_thread(place.get, "/metrics")
    assert 'forebay_reward_completions_total{model="m",outcome="scored"} 3.0' in metrics
    process.send_signal(signal.SIGTERM)
    _, told = await asyncio.to_thread(process.communicate, None, DEADLINE_S)
    await client.close()
    assert process.returncode == 0, told
    assert "reward-m INFO SIGTERM: finishing calls in progress" in told
    assert "Traceback" not in told


def test_sigterm_while_loading_ends_it_at_once(place: Place) -> None:
    place.write(path=f'"{place.folder / "slow"}"', make='"tests.reward.test_process:never"')
    process = place.start()
    assert process.stderr is not None
    for line in process.stderr:
        if "being made" in line:
            break
    assert place.get("/readyz") == (503, "not serving\n")
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, told
    assert "Traceback" not in told


def never(folder: Path, seed: int) -> None:
    """A maker that takes longer than any test."""
    print("being made", file=sys.stderr, flush=True)
    signal.sigwait([signal.SIGUSR2])


def test_what_a_setting_mends_is_one_line(place: Place) -> None:
    place.write(path='"./none"')
    assert place.refused() == 'forebay: reward.models.m.path is "./none": no such folder; ' + (
        "expected a checkpoint folder or a hub name"
    )
    models.llama(place.folder / "two", num_labels=2)
    place.write(path='"./two"')
    assert (
        place.refused() == "forebay: reward model m at two: it has 2 labels; expected a model with one (num_labels = 1)"
    )
    place.write(address='"192.0.2.1:7090"')
    assert "which others can reach without proof of who they are" in place.refused()
    place.write()
    assert (
        place.refused("--model", "n") == "forebay: --model n: no such reward model in the run file; expected one of m"
    )
    with socket.create_server(("127.0.0.1", int(place.address.rpartition(":")[2]))):
        told = place.refused()
    assert told.startswith(
        f"forebay: reward.models.m.address: cannot listen on {place.address}: the port is in use by pid"
    )


def test_a_run_file_without_models_or_with_several(place: Place) -> None:
    write(place.folder)
    assert place.refused() == "forebay: the run file has no reward model; expected a section [reward.models.NAME]"
    lines = [f'[reward.models.{name}]\npath = "x"\naddress = "127.0.0.1:{port}"' for name, port in (("a", 1), ("b", 2))]
    write(place.folder, "\n".join(lines))
    assert place.refused() == "forebay: which reward model? expected --model and one of a, b"


def test_the_client_imports_no_torch_and_the_base_names_the_extra(place: Place) -> None:
    heavy = "{'torch', 'transformers', 'vllm', 'deepspeed'}"
    program = f"import sys, forebay.reward.client, forebay.reward.service; assert not {heavy} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
    place.write()
    lacking = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        "from forebay.cli.main import main; sys.exit(main(['reward', 'run.toml']))"
    )
    found = subprocess.run([sys.executable, "-c", lacking], cwd=place.folder, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (2, 'forebay: the reward needs torch: pip install "forebay[reward]"\n')
