"""`forebay run` with its real buffer, real processes and real signals; sampler and learner are stand-ins."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.shells import free_ports

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
STEPS = 6
ENDLESS = "--learner.steps=100000"

pytestmark = pytest.mark.end_to_end


class Place:
    """A folder with a run file, and `forebay run` on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        grpc, http = free_ports(2)
        self.address = f"127.0.0.1:{grpc}"
        (folder / "model").mkdir()
        (folder / "model" / "config.json").touch()
        (folder / "run.toml").write_text(
            f'run = {{name = "test", folder = "{self.home}"}}\n'
            f'model = {{path = "{folder / "model"}"}}\n'
            'task = {name = "t", heldout_prompts = 20}\n'
            f'buffer = {{listen = "{self.address}", http = "127.0.0.1:{http}", member_timeout_s = 2.0}}\n'
            f"learner = {{steps = {STEPS}, groups_per_step = 2, group_size = 2, max_staleness = 1}}\n"
            'sampler = {fleet = "fleet", region = "here"}\n'
            "fleet = {samplers = 2}\n"
        )
        self.started: list[subprocess.Popen[str]] = []

    def order(self, name: str) -> None:
        """Have a stand-in do `name` (see tests.fleet.standins)."""
        (self.folder / name).touch()

    def start(self, *words: str) -> subprocess.Popen[str]:
        """`forebay WORDS`, in the background."""
        command = [sys.executable, "-m", "tests.fleet.run_with_standins", *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.started.append(process)
        watchdog = threading.Timer(DEADLINE_S, process.kill)
        watchdog.daemon = True
        watchdog.start()
        return process

    def run(self, *flags: str) -> tuple[int, str, str]:
        """`forebay run` to its end: exit code, standard output and error."""
        process = self.start("run", str(self.folder / "run.toml"), *flags)
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err

    @property
    def summary(self) -> dict[str, Any]:
        """What the run folder says the run came to."""
        found: dict[str, Any] = json.loads((self.home / "summary.json").read_text())
        return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def until_step(process: subprocess.Popen[str], step: int) -> None:
    """Read the output until a line is of that step or a later one; the place's deadline kills a process that hangs."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        found = re.search(r"step (\d+)/", line)
        if found and int(found[1]) >= step:
            return
    raise AssertionError(f"it ended before step {step}: {''.join(seen)}")


def nothing_listens(address: str) -> bool:
    """Whether the buffer is gone."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


def test_a_run_in_which_both_sides_are_killed_from_start_to_summary(place: Place) -> None:
    for role in ("learner", "sampler"):
        place.order(f"crash-{role}-3")
    code, out, err = place.run()
    assert (code, err) == (0, ""), out
    for part in (
        "sampler sampler-1 joined from fleet in here",
        "learner died: killed by SIGKILL (by hand, or out of memory); its last lines, from",
        "the stand-in learner is about to die",
        "restarting learner (1 of 3)",
        "the stand-in sampler is about to die",
        f"run             test: step {STEPS} of {STEPS}, finished",
        "held-out score  0.200 ± 0.020 → 0.900 ± 0.020 (20 prompts)",
        "learner 25 %, samplers 50 %",
        "ledger          balanced",
        f"plot            {place.home}/plot.png",
        f"checkpoint      {place.home}/learner/checkpoints/step_{STEPS:06}",
    ):
        assert part in out
    assert (place.home / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert place.summary["ledger_balanced"]
    assert place.summary["score_after"] == pytest.approx(0.9)
    assert nothing_listens(place.address)

    code, out, _ = place.run()
    assert code == 0
    assert "run test is finished already; --fresh starts it over" in out
    assert f"step {STEPS} of {STEPS}, finished" in out

    code, _, err = place.run("--learner.steps=3")
    assert code == 2
    assert f"learner.steps: {STEPS} in the run, 3 here" in err
    assert err.count("\n") == 1


def test_fresh_starts_over_and_a_second_supervisor_is_refused(place: Place) -> None:
    (place.home / "buffer" / "journal").mkdir(parents=True)
    (place.home / "buffer" / "journal" / "damaged.journal").touch()
    (place.home / ".forebay").touch()
    process = place.start("run", str(place.folder / "run.toml"), ENDLESS, "--fresh")
    until_step(process, 1)
    code, _, err = place.run("--fresh")
    assert code == 2
    assert f"forebay run (pid {process.pid}) works there" in err
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert nothing_listens(place.address)


def test_a_service_that_always_dies_ends_the_run(place: Place) -> None:
    place.order("crash-learner-2")
    code, out, err = place.run("--fleet.max_restarts=0")
    assert code == 1
    assert err.startswith(
        "forebay: learner died: killed by SIGKILL (by hand, or out of memory); fleet.max_restarts = 0 is used up"
    )
    assert err.count("\n") == 1
    assert "stopped; the same command goes on" in out
    assert nothing_listens(place.address)


def test_a_usage_error_of_a_service_ends_the_run_with_its_line(place: Place) -> None:
    place.order("refuse-sampler")
    code, _, err = place.run()
    assert (code, err) == (2, "forebay: the stand-in sampler refuses\n")


def test_a_run_goes_on_after_a_killed_supervisor_and_after_ctrl_c_until_it_is_drained(place: Place) -> None:
    file = str(place.folder / "run.toml")
    process = place.start("run", file, ENDLESS)
    until_step(process, 2)
    process.kill()
    process.wait()
    deadline = time.monotonic() + DEADLINE_S
    while not nothing_listens(place.address) and time.monotonic() < deadline:
        os.sched_yield()

    process = place.start("run", file, ENDLESS)
    until_step(process, 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (130, "")
    assert "draining: waiting for" in out
    assert "stopped; the same command goes on from its last checkpoint" in out
    reached = place.summary["step"]
    assert reached >= 3
    assert nothing_listens(place.address)

    process = place.start("run", file, ENDLESS)
    until_step(process, reached + 1)
    ask_everything(place, file)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, ""), out
    assert place.summary["step"] > reached
    offline = place.start("ledger", file)
    told, _ = offline.communicate(timeout=DEADLINE_S)
    assert offline.returncode == 0
    assert "balanced: produced = trained + buffered + leased + dropped" in told


def ask_everything(place: Place, file: str) -> None:
    """Status, ledger, plot, and last drain, of a running run."""
    status, _ = place.start("status", file, "--json").communicate(timeout=DEADLINE_S)
    members = {member["member"]["id"]: member["state"] for member in json.loads(status)["members"]}
    assert members == {"learner": "live", "sampler-0": "live", "sampler-1": "live"}
    shown, _ = place.start("status", "--connect", place.address).communicate(timeout=DEADLINE_S)
    assert "sampler-1" in shown
    ledger = place.start("ledger", file, "--json")
    counted, _ = ledger.communicate(timeout=DEADLINE_S)
    assert (ledger.returncode, json.loads(counted)["balanced"]) == (0, True)
    plot, _ = place.start("plot", file, "--out", str(place.folder / "x.png")).communicate(timeout=DEADLINE_S)
    assert plot == f"{place.folder}/x.png\n"
    place.start("drain", file).communicate(timeout=DEADLINE_S)
