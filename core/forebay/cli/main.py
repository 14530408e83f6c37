"""The `forebay` command. Nothing heavy is imported here: `--help` answers in under 200 ms."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import traceback
from collections.abc import Sequence

from forebay.cli import (
    configure,
    control,
    doctor,
    evaluate,
    ledger,
    plot,
    reference,
    replay,
    reward,
    run,
    services,
    watch,
    weights,
)
from forebay.cli.arguments import split_dotted
from forebay.errors import EXIT_FAILED, ForebayError, UsageError

EXIT_INTERRUPTED = 130

DESCRIPTION = """\
Reinforcement-learning post-training of language models as independent services:
samplers fill a buffer, a learner draws batches from it and publishes weights back."""

START = """\
start:
  forebay run run.toml          everything on this machine, with a live view
  forebay buffer run.toml       or each service by itself, anywhere: the buffer,
  forebay learner run.toml      the learner,
  forebay sampler run.toml      as many samplers as you like,
  forebay reward run.toml       and a reward model,
  forebay reference run.toml    and the reference model, if the run file has one"""


class _Parser(argparse.ArgumentParser):
    """argparse, but its complaints are forebay's one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{_understandable(message)}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed at work, 2 usage, 130 interrupted."""
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        return int(arguments.command(arguments))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _reader_gone()
    except Exception as error:
        return _report(error)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, understood. Raises UsageError."""
    rest, dotted = split_dotted(argv)
    arguments = build_parser().parse_args(rest)
    arguments.dotted = [*arguments.dotted, *dotted]
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """All commands."""
    parser = _Parser(
        prog="forebay",
        description=DESCRIPTION,
        epilog=START,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for group in (
        run,
        services,
        reward,
        reference,
        watch,
        ledger,
        control,
        evaluate,
        plot,
        replay,
        weights,
        configure,
        doctor,
    ):
        group.add(subparsers)
    return parser


def _understandable(message: str) -> str:
    """argparse's message, with the command that was probably meant instead of a list of all."""
    choice = re.match(r"argument \w+: invalid choice: '(.*?)' \(choose from (.*)\)", message)
    if choice is None:
        return message
    names = re.findall(r"[\w-]+", choice[2])
    close = difflib.get_close_matches(choice[1], names, n=1)
    return f"unknown command {choice[1]}; " + (f"did you mean {close[0]}" if close else f"expected one of {choice[2]}")


class _Version(argparse.Action):
    """Reads the installed version only when asked: importlib.metadata costs 20 ms."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, *_: object) -> None:
        from importlib.metadata import version

        print(f"forebay {version('forebay')}")
        raise SystemExit(0)


def _report(error: Exception) -> int:
    """One line on standard error, or with FOREBAY_DEBUG=1 all of it."""
    if os.environ.get("FOREBAY_DEBUG") == "1":
        traceback.print_exc()
    if isinstance(error, ForebayError):
        print(f"forebay: {_one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{where.filename}:{where.lineno}"
    told = _one_line(str(error)) or "no message"
    print(f"forebay: {type(error).__name__} at {place}: {told} (FOREBAY_DEBUG=1 shows all)", file=sys.stderr)
    return EXIT_FAILED


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _reader_gone() -> int:
    """`forebay ledger | head` is no failure of ours; without this, Python complains once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
