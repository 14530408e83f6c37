"""`forebay reference`: the reference model as a service of its own."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.cli.arguments import Subparsers, add_command, add_run_files, load_run
from forebay.cli.services import NEEDED, require
from forebay.cli.threads import settle_own_threads

if TYPE_CHECKING:
    from forebay.config.models import RunFile


def add(subparsers: Subparsers) -> None:
    """The command."""
    parser = add_command(
        subparsers,
        "reference",
        reference,
        summary="the reference model as its own service, if the run file gives it an address",
        example="forebay reference run.toml --learner.reference.address 127.0.0.1:7095",
    )
    add_run_files(parser)


def reference(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit code. Raises UsageError."""
    from forebay.config.home import prepare_home
    from forebay.config.model_source import model_source
    from forebay.obs.log import setup_logging

    run = load_run(arguments)
    require("learner", NEEDED["learner"])
    setup_logging("reference", run.observe.log_level)
    prepare_home(run)
    model_source(run.model, run.run.seed)
    settle_own_threads()
    entry: Callable[[RunFile], int] = importlib.import_module("forebay.learner.reference.service").serve
    return entry(run)
