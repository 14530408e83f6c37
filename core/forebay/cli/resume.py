"""`forebay resume`: go on after a pause, if wanted from an earlier checkpoint or with other coefficients."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import Subparsers, add_buffer_address, add_command, buffer_address, load_run, run_name
from forebay.cli.ask import ask, probe
from forebay.config.checkpoints import complete_steps, folder_of, name_of
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.config.models import RunFile

CHECKPOINT = re.compile(r"(?:.*/)?step_(\d+)/?|(\d+)")


def add(subparsers: Subparsers) -> None:
    """The command."""
    parser = add_command(
        subparsers,
        "resume",
        resume,
        summary="go on after a pause; also from an earlier checkpoint, also with other coefficients",
        example="forebay resume run.toml --from 40 --set learner.kl_coef=0.1 --set learner.lr=5e-7",
    )
    add_buffer_address(parser)
    parser.add_argument(
        "--from", dest="checkpoint", metavar="STEP", help="go back to this checkpoint; later ones are set aside"
    )
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="KEY=VALUE",
        help="from the checkpoint on, train with this; repeatable. Like --from, on the machine of the learner",
    )  # fmt: skip


def resume(arguments: argparse.Namespace) -> int:
    """Raises NoBuffer, UsageError."""
    address = buffer_address(arguments)
    if arguments.changes or arguments.checkpoint is not None:
        probe(address)
        _steer(arguments)
    ask(address, lambda buffer: buffer.resume(), run_name(arguments))
    print(f"resumed the run at {address}")
    return 0


def _steer(arguments: argparse.Namespace) -> None:
    """Say in the run folder how the learner goes on; one that is running starts again when it sees it."""
    from forebay.config.steering import Steering

    if not arguments.run_files:
        raise UsageError("--from and --set: expected a run file, they change what is in its run folder")
    settings = _settings(arguments)
    run = load_run(arguments)
    home, steps = run.run.home, _checkpoints(run)
    after = max(steps) if arguments.checkpoint is None else _chosen(arguments.checkpoint, steps, home)
    Steering.read(home).changed(after, settings).write(home)
    for step in steps:
        if step > after:
            print(f"checkpoint of step {step} set aside: {_set_aside(folder_of(home), step)}")
    told = ", ".join(f"{key} = {value}" for key, value in settings.items())
    print(f"the learner goes on from step {after}" + (f" with {told}" if told else ""))


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `--set` says, read as the run file would be. Raises UsageError."""
    import os

    from forebay.cli.arguments import run_flags
    from forebay.config.learner_section import STEERABLE
    from forebay.config.load import load
    from forebay.config.sources import Flag

    flags = []
    for change in arguments.changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise UsageError(f"--set {change}: expected KEY=VALUE")
        flags.append(Flag(key=key, text=text, origin=f"--set {key}"))
    run = load(arguments.run_files, os.environ, [*run_flags(arguments), *flags])
    for flag in flags:
        if flag.key not in STEERABLE:
            raise UsageError(
                f"--set {flag.key}: fixed when the run began; expected one of {', '.join(sorted(STEERABLE))}"
            )
    return {flag.key: _value(run, flag.key) for flag in flags}


def _value(run: RunFile, key: str) -> Any:
    node: Any = run
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _checkpoints(run: RunFile) -> list[int]:
    """Steps that the learner can go on from: complete checkpoints, and 0 while the buffer still has every batch since.

    Raises UsageError.
    """
    folder = folder_of(run.run.home)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; --from and --set work where the learner runs")
    found = complete_steps(run.run.home)
    saved = len(found) + len(list(folder.glob("aside_*")))
    return [*([0] if saved < run.learner.keep_checkpoints else []), *found]


def _chosen(text: str, steps: list[int], home: Path) -> int:
    match = CHECKPOINT.fullmatch(text)
    step = int(match[1] or match[2]) if match else -1
    if step not in steps:
        raise UsageError(f"--from {text}: no such checkpoint in {home}; expected one of {', '.join(map(str, steps))}")
    return step


def _set_aside(checkpoints: Path, step: int) -> Path:
    """Out of the learner's sight, in place of what was set aside for this step before; where it is now."""
    aside = checkpoints / f"aside_{step:06d}"
    shutil.rmtree(aside, ignore_errors=True)
    return (checkpoints / name_of(step)).rename(aside)
