"""`forebay status | top`: look at a running run, once or continuously."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from forebay.cli.arguments import Subparsers, add_buffer_address, add_command, buffer_address, run_name
from forebay.cli.ask import NoBuffer, ask

if TYPE_CHECKING:
    from forebay.obs.live import Display
    from forebay.wire.v1 import control_pb2

EVERY_S = 1.0


def add(subparsers: Subparsers) -> None:
    """The two commands."""
    status_parser = add_command(
        subparsers,
        "status",
        status,
        summary="who takes part, what everybody does or waits for, and what limits the run",
        example="forebay status --connect 10.0.0.5:7070 --json",
    )
    status_parser.add_argument("--json", action="store_true", help="print one JSON object")
    top_parser = add_command(
        subparsers,
        "top",
        top,
        summary="the status, continuously; Ctrl-C leaves the run alone",
        example="forebay top run.toml",
    )
    for parser in (status_parser, top_parser):
        add_buffer_address(parser)


def status(arguments: argparse.Namespace) -> int:
    """Print the picture once. Raises NoBuffer."""
    found = _status(buffer_address(arguments), run_name(arguments))
    if arguments.json:
        from forebay.obs.wire_json import plain

        print(json.dumps(plain(found)))
        return 0
    from rich.console import Console

    from forebay.obs.view import Picture, render

    Console().print(render(Picture(title=found.run, status=found)))
    return 0


def top(arguments: argparse.Namespace) -> int:
    """Show the picture until the run is finished. Raises NoBuffer when none answers at first."""
    from threading import Event

    from forebay.obs.live import Display

    address, run = buffer_address(arguments), run_name(arguments)
    found: control_pb2.StatusResponse | None = _status(address, run)
    never = Event()
    with Display(address, sys.stdout) as display:
        while True:
            display.show(found)
            if found is not None and found.state == "finished":
                return 0
            never.wait(EVERY_S)
            found = _status_or_note(address, run, display)


def _status(address: str, run: str) -> control_pb2.StatusResponse:
    return ask(address, lambda buffer: buffer.status(), run)


def _status_or_note(address: str, run: str, display: Display) -> control_pb2.StatusResponse | None:
    try:
        return _status(address, run)
    except NoBuffer as error:
        display.note(str(error))
        return None
