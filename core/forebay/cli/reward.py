"""`forebay reward`: a reward model as a service of its own."""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.cli.arguments import Subparsers, add_command, add_run_files, load_run
from forebay.cli.services import NEEDED, require
from forebay.cli.threads import settle_own_threads
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.config.models import RunFile


def add(subparsers: Subparsers) -> None:
    """The command."""
    parser = add_command(
        subparsers,
        "reward",
        reward,
        summary="a reward model as its own service: scores what samplers send it",
        example="forebay reward run.toml --model helpfulness",
    )
    add_run_files(parser)
    parser.add_argument("--model", metavar="NAME", help="which [reward.models.NAME]; needed when there are several")


def reward(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit code. Raises UsageError."""
    from forebay.config.home import prepare_home
    from forebay.obs.log import setup_logging

    run = load_run(arguments)
    name = chosen(run, arguments.model)
    require("reward", NEEDED["reward"])
    setup_logging(f"reward-{name}", run.observe.log_level)
    prepare_home(run)  # many a model is made inside it
    settle_own_threads()
    entry: Callable[[RunFile, str], int] = importlib.import_module("forebay.reward.service").serve
    return entry(run, name)


def chosen(run: RunFile, name: str | None) -> str:
    """The name of the model that is meant. Raises UsageError."""
    names = list(run.reward.models)
    if not names:
        raise UsageError("the run file has no reward model; expected a section [reward.models.NAME]")
    if name is None:
        if len(names) > 1:
            raise UsageError(f"which reward model? expected --model and one of {', '.join(names)}")
        return names[0]
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(names)}"
        raise UsageError(f"--model {name}: no such reward model in the run file; {hint}")
    return name
