"""Real processes under real signals: what is started never outlives who started it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.fleet.process import Service, ServiceProcess, exit_cause, last_lines, usage_line
from forebay.fleet.reaper import Reaper
from forebay.fleet.wakeups import Wakeups

#: A stand-in service with a child of its own, as vLLM's engine is one; it says both pids and waits.
WITH_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print('child', flush=True); time.sleep(600)"])
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""

#: A stand-in supervisor that starts the service above and waits to be killed.
SUPERVISOR = """
import sys, time, pathlib, os
from forebay.fleet.process import Service, ServiceProcess
from forebay.fleet.reaper import Reaper
with Reaper() as reaper:
    command, log = (sys.executable, "-c", sys.argv[1]), pathlib.Path(sys.argv[2])
    service = Service(name="s", role="sampler", command=command, log=log)
    ServiceProcess(service, os.environ, reaper)
    print("started", flush=True)
    time.sleep(600)
"""

DEADLINE_S = 20.0


def service(folder: Path, program: str) -> Service:
    """A stand-in service that runs a Python program."""
    return Service(name="stand-in", role="sampler", command=(sys.executable, "-c", program), log=folder / "log")


@pytest.fixture
def reaper() -> Iterator[Reaper]:
    with Reaper() as started:
        yield started


def until_dead(pid: int) -> None:
    """Wait until the process is gone; a zombie that nobody waits for is gone too."""
    descriptor = os.pidfd_open(pid)
    try:
        assert select.select([descriptor], [], [], DEADLINE_S)[0], f"{pid} still lives"
    finally:
        os.close(descriptor)


def pids_in(log: Path) -> tuple[int, int]:
    """The service's pid and its child's, once both have started."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        words = log.read_text().split() if log.exists() else []
        if "pids" in words and "child" in words:
            at = words.index("pids")
            return int(words[at + 1]), int(words[at + 2])
    raise AssertionError("the stand-in did not start")


def exit_code(process: ServiceProcess) -> int:
    """Wait for the end."""
    until_dead(process.pid)
    code = process.poll()
    assert code is not None
    return code


def test_output_goes_to_the_log_and_the_exit_code_comes_back(tmp_path: Path, reaper: Reaper) -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    for _ in range(2):
        assert exit_code(ServiceProcess(service(tmp_path, program), os.environ, reaper)) == 3
    text = (tmp_path / "log").read_text()
    assert text.count("--- stand-in started") == 2
    assert sorted(last_lines(tmp_path / "log", 10)) == ["err", "out"]


def test_terminate_is_sigterm_and_kill_takes_the_group(tmp_path: Path, reaper: Reaper) -> None:
    first = ServiceProcess(
        service(tmp_path, "import time; print('pids', flush=True); time.sleep(600)"), os.environ, reaper
    )
    first.terminate()
    assert exit_code(first) == -signal.SIGTERM
    second = ServiceProcess(service(tmp_path / "b", WITH_CHILD), os.environ, reaper)
    _, child = pids_in(tmp_path / "b" / "log")
    second.kill()
    assert second.poll() == -signal.SIGKILL
    until_dead(child)


def test_the_child_of_a_killed_service_goes_with_it(tmp_path: Path, reaper: Reaper) -> None:
    process = ServiceProcess(service(tmp_path, WITH_CHILD), os.environ, reaper)
    own, child = pids_in(tmp_path / "log")
    assert own == process.pid
    os.kill(own, signal.SIGKILL)
    assert exit_code(process) == -signal.SIGKILL
    until_dead(child)


def test_a_killed_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    log = tmp_path / "log"
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, WITH_CHILD, str(log)], stdout=subprocess.PIPE)
    own, child = pids_in(log)
    supervisor.send_signal(signal.SIGKILL)
    supervisor.communicate(timeout=DEADLINE_S)
    until_dead(own)
    until_dead(child)


def test_a_leash_whose_holder_is_gone_lets_nothing_start() -> None:
    ended = subprocess.run([sys.executable, "-m", "forebay.fleet.leash", "1", sys.executable, "-c", "print('ran')"])
    assert ended.returncode == -signal.SIGKILL


def test_causes_in_words() -> None:
    assert exit_cause(1) == "exit code 1"
    assert exit_cause(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert exit_cause(-signal.SIGKILL) == "killed by SIGKILL (by hand, or out of memory)"


def test_only_lines_since_the_last_start_count(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("--- a started\nforebay: old\n--- a started\nnoise\n\nforebay: new\n")
    assert last_lines(log, 5) == ["noise", "forebay: new"]
    assert usage_line(log) == "new"
    log.write_text("x" * (1 << 20) + "\n--- a started\n")
    assert last_lines(log, 5) == []
    assert usage_line(tmp_path / "missing") is None


def test_a_signal_ends_a_wait_and_is_counted() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Wakeups() as wakeups:
        os.kill(os.getpid(), signal.SIGTERM)
        wakeups.wait(DEADLINE_S)
        assert wakeups.stops == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_dying_child_ends_a_wait() -> None:
    with Wakeups() as wakeups:
        child = subprocess.Popen([sys.executable, "-c", "pass"])
        started_at_s = time.monotonic()
        wakeups.wait(DEADLINE_S)
        assert time.monotonic() - started_at_s < DEADLINE_S
        child.wait()
        assert wakeups.stops == []
