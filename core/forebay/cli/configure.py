"""`forebay config check | show | schema | model`: the run file by itself."""

from __future__ import annotations

import argparse
import json

from forebay.cli.arguments import Subparsers, add_command, add_run_files, load_run
from forebay.cli.threads import settle_own_threads


def add(subparsers: Subparsers) -> None:
    """The command and its parts."""
    parser = subparsers.add_parser("config", help="check, show or describe run files", description="Run files.")
    parts: Subparsers = parser.add_subparsers(title="parts", metavar="PART", required=True)
    check_parser = add_command(
        parts, "check", check, summary="say whether a run file is valid", example="forebay config check run.toml"
    )
    show_parser = add_command(
        parts,
        "show",
        show,
        summary="print the resolved run file: defaults, files, environment and flags together",
        example="forebay config show run.toml --learner.lr 1e-6",
    )
    add_command(parts, "schema", schema, summary="print the JSON schema of run files", example="forebay config schema")
    model_parser = add_command(
        parts,
        "model",
        model,
        summary="make or find the run file's model and print where it is; services do it by themselves",
        example="forebay config model examples/quickstart.toml",
    )
    add_run_files(model_parser)
    add_run_files(check_parser)
    add_run_files(show_parser)


def check(arguments: argparse.Namespace) -> int:
    """Raises UsageError with the mistake."""
    run = load_run(arguments)
    print(f"{' and '.join(map(str, arguments.run_files))}: valid, run {run.run.name}")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print the resolved run file as TOML."""
    from forebay.config.toml_text import toml_text

    print(toml_text(load_run(arguments).model_dump(mode="json")), end="")
    return 0


def schema(_arguments: argparse.Namespace) -> int:
    """Print the JSON schema, for editors."""
    from forebay.config.models import RunFile

    print(json.dumps(RunFile.model_json_schema(), indent=2))
    return 0


def model(arguments: argparse.Namespace) -> int:
    """Make the model if it is missing and can be made. Raises UsageError."""
    from forebay.config.home import prepare_home
    from forebay.config.model_source import model_source
    from forebay.obs.log import setup_logging

    run = load_run(arguments)
    setup_logging("model", run.observe.log_level)
    settle_own_threads(alone=True)
    prepare_home(run)  # many a model is made inside it
    print(model_source(run.model, run.run.seed))
    return 0
