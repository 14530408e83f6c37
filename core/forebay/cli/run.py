"""`forebay run`: everything on this machine, supervised."""

from __future__ import annotations

import argparse

from forebay.cli.arguments import Subparsers, add_command, add_run_files, load_run, run_flags
from forebay.cli.services import NEEDED, require


def add(subparsers: Subparsers) -> None:
    """The command."""
    parser = add_command(
        subparsers,
        "run",
        run_here,
        summary="a whole run on this machine: buffer, learner, samplers, reward models, supervised, with a live view",
        example="forebay run examples/quickstart.toml --learner.steps 20",
    )
    add_run_files(parser)
    parser.add_argument("--fresh", action="store_true", help="remove what an earlier run left in the run folder first")


def run_here(arguments: argparse.Namespace) -> int:
    """Supervise a whole run; goes on where an earlier one stopped. Raises UsageError."""
    run = load_run(arguments)
    for role in ("sampler", "learner", *(("reward",) if run.reward.models else ())):
        require(role, NEEDED[role])
    from forebay.fleet.local import run_all

    flags = [word for flag in run_flags(arguments) for word in flag.arguments]
    return run_all(run, [*map(str, arguments.run_files), *flags], fresh=arguments.fresh)
