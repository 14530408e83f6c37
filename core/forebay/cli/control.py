"""`forebay pause | drain`, and `forebay resume` of its own file: steer a running run."""

from __future__ import annotations

import argparse

from forebay.cli.arguments import Subparsers, add_buffer_address, add_command, buffer_address, run_name
from forebay.cli.ask import ask
from forebay.cli.resume import add as add_resume


def add(subparsers: Subparsers) -> None:
    """The three commands."""
    add_resume(subparsers)
    pause_parser = add_command(
        subparsers,
        "pause",
        pause,
        summary="stop giving out work; what is in flight is finished",
        example='forebay pause run.toml --reason "looking at step 40"',
    )
    pause_parser.add_argument("--reason", default="by hand", help="shown in the status")
    drain_parser = add_command(
        subparsers,
        "drain",
        drain,
        summary="end the run in order: finish what is in flight, checkpoint, leave",
        example="forebay drain run.toml",
    )
    for parser in (pause_parser, drain_parser):
        add_buffer_address(parser)


def pause(arguments: argparse.Namespace) -> int:
    """Raises NoBuffer."""
    address = buffer_address(arguments)
    ask(address, lambda buffer: buffer.pause(arguments.reason), run_name(arguments))
    print(f"paused the run at {address}; forebay resume goes on")
    return 0


def drain(arguments: argparse.Namespace) -> int:
    """Raises NoBuffer."""
    address = buffer_address(arguments)
    ask(address, lambda buffer: buffer.drain(), run_name(arguments))
    print(f"draining the run at {address}; forebay status shows how far it is")
    return 0
