"""The services that `forebay run` starts on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from forebay.buffer.ports import is_here
from forebay.config.models import RunFile
from forebay.fleet.process import Service


def local_services(run: RunFile, arguments: Sequence[str]) -> list[Service]:
    """Buffer, learner, samplers and the frozen models of this machine, each with the given run files and flags."""
    return [
        *replay_services(run, arguments),
        *(_reward(run, name, arguments) for name, model in run.reward.models.items() if is_here(model.address)),
        *(_sampler(run, index, arguments) for index in range(run.fleet.samplers)),
    ]


def replay_services(run: RunFile, arguments: Sequence[str]) -> list[Service]:
    """Buffer, learner and its reference model, where that is a service of this machine: all that trains recorded
    batches."""
    reference = run.learner.reference.address
    roles = ("buffer", "learner", *(("reference",) if reference is not None and is_here(reference) else ()))
    return [_service(run, role, role, arguments) for role in roles]


def model_maker(run: RunFile, arguments: Sequence[str]) -> Service:
    """The process that makes the model: it frees its memory when it is done."""
    return Service(name="model", role="model", command=_forebay("config", "model", *arguments), log=_log(run, "model"))


def _service(run: RunFile, role: str, name: str, arguments: Sequence[str]) -> Service:
    return Service(name=name, role=role, command=_forebay(role, *arguments), log=_log(run, name))


def _sampler(run: RunFile, index: int, arguments: Sequence[str]) -> Service:
    # A lasting id: after a restart the sampler is the same member, and what its predecessor held is free at once.
    name = f"{run.sampler.id or 'sampler'}-{index}"
    return _service(run, "sampler", name, [*arguments, f"--sampler.id={name}"])


def _reward(run: RunFile, name: str, arguments: Sequence[str]) -> Service:
    return Service(
        name=f"reward-{name}",
        role="reward",
        command=_forebay("reward", *arguments, "--model", name),
        log=_log(run, f"reward-{name}"),
    )


def _forebay(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "forebay.cli.main", *words)


def _log(run: RunFile, name: str) -> Path:
    return run.run.home / "logs" / f"{name}.log"
