"""Reward models under `forebay run`: which are started, and that they outlive those who ask them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from forebay.fleet.process import Service
from forebay.fleet.services import local_services
from forebay.fleet.supervise import SERVERS, Supervisor
from tests.fleet.test_supervise import StandInProcess
from tests.reward.support import run_file

NAMES = ("buffer", "learner", "reward-m", "sampler-0")


class Stage:
    """A supervisor over stand-ins, all started."""

    def __init__(self, folder: Path, max_restarts: int = 1) -> None:
        self.now_s, self.told = 0.0, list[str]()
        self.started: dict[str, list[StandInProcess]] = {name: [] for name in NAMES}
        services = [
            Service(name=name, role=name.partition("-")[0], command=(), log=folder / f"{name}.log") for name in NAMES
        ]
        self.supervisor = Supervisor(
            services, self._launch, max_restarts=max_restarts, clock=lambda: self.now_s, tell=self.told.append
        )
        for role in (*SERVERS, "learner", "sampler"):
            self.supervisor.start(role)

    def _launch(self, service: Service) -> StandInProcess:
        process = StandInProcess()
        self.started[service.name].append(process)
        return process

    def asked_to_end(self) -> set[str]:
        return {name for name, processes in self.started.items() if processes[-1].asked_to_end}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_only_models_of_this_machine_are_started(tmp_path: Path) -> None:
    addresses = {
        "here": "127.0.0.1:7090",
        "too": "localhost:7091",
        "away": "192.0.2.7:7090",
        "unknown": "nosuch.invalid:1",
    }
    services = local_services(run_file(tmp_path, addresses), ["run.toml", "--learner.lr=1"])
    rewards = [service for service in services if service.role == "reward"]
    assert [service.name for service in rewards] == ["reward-here", "reward-too"]
    assert rewards[0].command[-5:] == ("reward", "run.toml", "--learner.lr=1", "--model", "here")
    assert rewards[0].log == tmp_path / "logs" / "reward-here.log"


@pytest.mark.parametrize(("address", "started"), [("127.0.0.1:7095", True), ("192.0.2.7:7095", False), (None, False)])
def test_a_reference_of_this_machine_is_started(tmp_path: Path, address: str | None, started: bool) -> None:
    run = run_file(tmp_path, {})
    learner = run.learner.model_copy(
        update={"reference": run.learner.reference.model_copy(update={"address": address})}
    )
    services = local_services(run.model_copy(update={"learner": learner}), ["run.toml"])
    assert [service.command[-2:] for service in services if service.role == "reference"] == (
        [("reference", "run.toml")] if started else []
    )


def test_a_drain_leaves_the_model_to_those_who_still_ask_it(stage: Stage) -> None:
    stage.supervisor.drain()
    assert stage.asked_to_end() == {"learner", "sampler-0"}
    for name in ("learner", "sampler-0"):
        stage.started[name][-1].code = 0
    stage.supervisor.tick(None)
    assert stage.supervisor.only_buffers_left
    stage.supervisor.end_buffers()
    assert stage.asked_to_end() == set(NAMES)
    for name in ("buffer", "reward-m"):
        stage.started[name][-1].code = 0
    assert stage.supervisor.tick(None) == 0


@pytest.mark.parametrize("code", [0, 1, -signal.SIGKILL])
def test_a_model_that_ends_too_early_is_started_again(stage: Stage, code: int) -> None:
    stage.started["reward-m"][-1].code = code
    stage.supervisor.tick(None)
    stage.supervisor.tick(None)
    assert len(stage.started["reward-m"]) == 2
    assert stage.told[-1] == "restarting reward-m (1 of 1)"


def test_a_model_that_does_not_stay_ends_the_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path, max_restarts=0)
    stage.started["reward-m"][-1].code = 1
    stage.supervisor.tick(None)
    assert "reward-m died: exit code 1; fleet.max_restarts = 0 is used up" in stage.supervisor.failure
    assert stage.asked_to_end() == {"learner", "sampler-0"}
