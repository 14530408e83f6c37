"""The supervisor's decisions, with stand-in processes and a clock that tests move."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from forebay.fleet.process import Service
from forebay.fleet.supervise import BUFFER_GRACE_S, FAILED_GRACE_S, Progress, Supervisor

NAMES = (("buffer", "buffer"), ("learner", "learner"), ("sampler-0", "sampler"), ("sampler-1", "sampler"))


class StandInProcess:
    """A process that ends when the test says so."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.asked_to_end = 0
        self.killed = False

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.asked_to_end += 1

    def kill(self) -> None:
        self.killed = True


class Stage:
    """A supervisor over stand-ins, all started."""

    def __init__(self, folder: Path, max_restarts: int = 2) -> None:
        self.now_s = 100.0
        self.told: list[str] = []
        self.started: dict[str, list[StandInProcess]] = {name: [] for name, _ in NAMES}
        self.folder = folder
        services = [Service(name=name, role=role, command=(), log=folder / f"{name}.log") for name, role in NAMES]
        self.supervisor = Supervisor(
            services, self._launch, max_restarts=max_restarts, clock=lambda: self.now_s, tell=self.told.append
        )
        for role in ("buffer", "learner", "sampler"):
            self.supervisor.start(role)

    def _launch(self, service: Service) -> StandInProcess:
        process = StandInProcess()
        self.started[service.name].append(process)
        return process

    def end(self, name: str, code: int) -> None:
        """The newest process of the service ends."""
        self.started[name][-1].code = code

    def tick(self, *, state: str = "running", step: int = 3) -> int | None:
        """A second passes; the buffer says `state` and `step` of 10."""
        self.now_s += 1.0
        return self.supervisor.tick(Progress(at_s=self.now_s, step=step, steps=10, state=state))

    def starts(self) -> dict[str, int]:
        """How often each service was started."""
        return {name: len(processes) for name, processes in self.started.items()}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_run_that_finishes(stage: Stage) -> None:
    assert stage.tick() is None
    stage.end("learner", 0)
    assert stage.tick(step=10) is None
    assert not stage.supervisor.only_buffers_left
    for name in ("sampler-0", "sampler-1"):
        stage.end(name, 0)
    stage.tick(state="finished", step=10)
    stage.tick(state="finished", step=10)
    assert stage.supervisor.only_buffers_left
    stage.supervisor.end_buffers()
    stage.supervisor.end_buffers()
    assert stage.started["buffer"][0].asked_to_end == 1
    stage.end("buffer", 0)
    assert stage.tick() == 0
    assert set(stage.starts().values()) == {1}


@pytest.mark.parametrize("name", ["buffer", "learner", "sampler-0"])
def test_a_dead_service_is_named_with_its_last_lines_and_restarted(stage: Stage, name: str) -> None:
    (stage.folder / f"{name}.log").write_text("--- started\nhalf way\nout of luck\n")
    stage.end(name, -signal.SIGKILL)
    stage.tick()
    stage.tick()
    assert stage.starts()[name] == 2
    assert stage.told[0].startswith(f"{name} died: killed by SIGKILL")
    assert stage.told[1:] == ["  half way", "  out of luck", f"restarting {name} (1 of 2)"]


def test_restarts_are_spaced_and_then_given_up(stage: Stage) -> None:
    stage.end("learner", 1)
    stage.tick()
    stage.tick()
    stage.end("learner", 1)
    stage.tick()
    assert stage.starts()["learner"] == 2
    stage.tick()
    assert stage.starts()["learner"] == 3
    stage.end("learner", 1)
    stage.tick()
    assert "learner died: exit code 1; fleet.max_restarts = 2 is used up" in stage.supervisor.failure
    assert stage.started["sampler-0"][0].asked_to_end == 1
    assert stage.started["buffer"][0].asked_to_end == 0


def test_what_does_not_end_after_a_failure_is_killed_but_the_buffer(tmp_path: Path) -> None:
    stage = Stage(tmp_path, max_restarts=0)
    stage.end("learner", 1)
    stage.tick()
    stage.now_s += FAILED_GRACE_S
    stage.tick()
    assert stage.started["sampler-0"][0].killed
    assert not stage.started["buffer"][0].killed
    assert stage.supervisor.only_buffers_left
    stage.supervisor.end_buffers()
    stage.now_s += BUFFER_GRACE_S
    assert stage.tick() == 1
    assert stage.started["buffer"][0].killed


def test_a_usage_error_is_repeated_and_not_tried_again(stage: Stage) -> None:
    (stage.folder / "sampler-1.log").write_text("--- started\nforebay: sampler.engine.dtype is 3\n")
    stage.end("sampler-1", 2)
    stage.tick()
    assert stage.starts()["sampler-1"] == 1
    assert stage.supervisor.failure == "sampler.engine.dtype is 3"
    for name in ("learner", "sampler-0"):
        stage.end(name, 0)
    stage.tick()
    stage.supervisor.end_buffers()
    stage.end("buffer", 0)
    assert stage.tick() == 2


def test_a_drain_asks_samplers_and_learner_and_the_buffer_last(stage: Stage) -> None:
    stage.supervisor.drain()
    asked = {name: processes[0].asked_to_end for name, processes in stage.started.items()}
    assert asked == {"buffer": 0, "learner": 1, "sampler-0": 1, "sampler-1": 1}
    stage.end("sampler-0", -signal.SIGTERM)
    for name in ("learner", "sampler-1"):
        stage.end(name, 0)
    stage.tick()
    assert stage.supervisor.awaited() == ["buffer"]
    assert stage.supervisor.only_buffers_left
    stage.supervisor.end_buffers()
    stage.end("buffer", 0)
    assert stage.tick() == 0
    assert set(stage.starts().values()) == {1}


def test_a_death_while_draining_is_a_failure_and_not_restarted(stage: Stage) -> None:
    stage.supervisor.drain()
    stage.end("learner", 1)
    stage.tick()
    assert "learner did not end in order: exit code 1" in stage.supervisor.failure
    assert stage.starts()["learner"] == 1


def test_forebay_drain_lets_services_go(stage: Stage) -> None:
    for name in ("learner", "sampler-0", "sampler-1"):
        stage.end(name, 0)
    stage.tick(state="draining")
    stage.tick(state="draining")
    assert stage.supervisor.only_buffers_left
    assert set(stage.starts().values()) == {1}


def test_who_leaves_before_the_run_is_finished_comes_back(stage: Stage) -> None:
    stage.end("sampler-0", 0)
    stage.tick()
    stage.tick()
    stage.tick()
    assert stage.starts()["sampler-0"] == 2
    assert "sampler-0 died: left before the run was finished" in stage.told[0]


def test_leaving_is_judged_by_what_the_buffer_says_afterwards(stage: Stage) -> None:
    old = Progress(at_s=stage.now_s, step=3, steps=10, state="running")
    stage.now_s += 1.0
    stage.end("sampler-0", 0)
    for progress in (old, None, old):
        stage.supervisor.tick(progress)
    assert stage.starts()["sampler-0"] == 1
    assert stage.told == []
    stage.tick(state="finished")
    assert stage.told == []


def test_a_kill_ends_everything_at_once(stage: Stage) -> None:
    stage.supervisor.kill()
    assert all(process.killed for processes in stage.started.values() for process in processes)
    assert stage.tick() == 0


def test_a_drain_before_the_workers_are_started(tmp_path: Path) -> None:
    service = Service(name="learner", role="learner", command=(), log=tmp_path / "log")
    supervisor = Supervisor([service], lambda _: StandInProcess(), max_restarts=1, clock=lambda: 0.0, tell=print)
    supervisor.drain()
    assert supervisor.only_buffers_left
