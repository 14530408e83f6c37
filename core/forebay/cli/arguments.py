"""What command lines of forebay have in common: run files, dotted flags, which buffer to ask."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forebay.errors import UsageError

if TYPE_CHECKING:  # pydantic is too heavy for `forebay --help`
    from forebay.config.models import RunFile
    from forebay.config.sources import Flag

DOTTED = re.compile(r"--([A-Za-z]\w*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
ANY_KEY = "any key of the run file is a flag: --learner.lr 1e-6, --sampler.engine.dtype=float32"
Command = Callable[[argparse.Namespace], int]


class Subparsers(Protocol):
    """What `add_subparsers` returns."""

    def add_parser(self, name: str, **kwargs: Any) -> argparse.ArgumentParser: ...


def split_dotted(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Take `--section.key value` and `--section.key=value` out: the rest, and (key, text, flag as typed) each."""
    rest: list[str] = []
    dotted: list[tuple[str, str, str]] = []
    words = iter(argv)
    for word in words:
        match = DOTTED.fullmatch(word)
        if match is None:
            rest.append(word)
            continue
        text = match[2] if match[2] is not None else next(words, None)
        if text is None:
            raise UsageError(f"{word}: expected a value, {word}=VALUE")
        dotted.append((match[1], text, f"--{match[1]}"))
    return rest, dotted


def add_command(
    subparsers: Subparsers, name: str, command: Command, *, summary: str, example: str
) -> argparse.ArgumentParser:
    """A command with its one line of help and an example."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=summary[:1].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}\n\n{ANY_KEY}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=command, dotted=[])
    return parser


def add_run_files(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The positional run files; later ones override earlier ones."""
    parser.add_argument(
        "run_files",
        nargs="*" if optional else "+",
        type=Path,
        metavar="run.toml",
        help="the run file; several: later ones override",
    )


def add_buffer_address(parser: argparse.ArgumentParser) -> None:
    """The run file or an address, to say which buffer is asked."""
    add_run_files(parser, optional=True)
    parser.add_argument("--connect", metavar="HOST:PORT", help="the buffer's address, instead of a run file")
    parser.add_argument("--run", metavar="NAME", help="which run, when the buffer at HOST:PORT serves several")


def run_flags(arguments: argparse.Namespace) -> list[Flag]:
    """The dotted flags of a command line."""
    from forebay.config.sources import Flag

    return [Flag(key=key, text=text, origin=origin) for key, text, origin in arguments.dotted]


def load_run(arguments: argparse.Namespace) -> RunFile:
    """The resolved run file of a command line. Raises UsageError."""
    import os

    from forebay.config.load import load

    return load(arguments.run_files, os.environ, run_flags(arguments))


def buffer_address(arguments: argparse.Namespace) -> str:
    """Where the buffer listens, as `--connect` or the run file says."""
    if arguments.connect:
        return str(arguments.connect)
    if not arguments.run_files:
        raise UsageError("which buffer? expected a run file or --connect HOST:PORT")
    return load_run(arguments).sampler_target


def run_name(arguments: argparse.Namespace) -> str:
    """The run that is asked about, as `--run` or the run file says; "" when neither does."""
    if arguments.run or not arguments.run_files:
        return arguments.run or ""
    return load_run(arguments).run.name
