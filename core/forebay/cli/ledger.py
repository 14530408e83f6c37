"""`forebay ledger`: what became of everything that was produced; exit code 1 when it does not add up."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from forebay.cli.arguments import Subparsers, add_buffer_address, add_command, buffer_address, load_run, run_name
from forebay.cli.ask import NoBuffer, ask
from forebay.errors import EXIT_DONE, EXIT_FAILED

if TYPE_CHECKING:
    from forebay.wire.v1 import experience_pb2


def add(subparsers: Subparsers) -> None:
    """The command."""
    parser = add_command(
        subparsers,
        "ledger",
        ledger,
        summary="check that produced = trained + buffered + leased + dropped; exit code 1 when not",
        example="forebay ledger run.toml --versions",
    )
    add_buffer_address(parser)
    parser.add_argument("--versions", action="store_true", help="a row a version, not only a fleet")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def ledger(arguments: argparse.Namespace) -> int:
    """Print the table and the verdict. Raises NoBuffer when neither a buffer nor a journal is there."""
    from forebay.buffer.conservation import imbalances

    found = read_ledger(arguments)
    wrong = imbalances(found)
    if arguments.json:
        from forebay.obs.wire_json import plain

        print(json.dumps({**plain(found), "balanced": not wrong, "imbalances": wrong}))
    else:
        _print(found, wrong, by_version=arguments.versions)
    return EXIT_FAILED if wrong else EXIT_DONE


def read_ledger(arguments: argparse.Namespace) -> experience_pb2.LedgerResponse:
    """From the running buffer, else from the journal in the run folder. Raises NoBuffer, or what the journal raises."""
    try:
        return ask(buffer_address(arguments), lambda buffer: buffer.ledger(), run_name(arguments))
    except NoBuffer:
        if arguments.connect or not arguments.run_files:
            raise
        journal = load_run(arguments).run.home / "buffer" / "journal"
        if not journal.exists():
            raise
        from forebay.buffer.conservation import ledger_of

        return ledger_of(journal)


def _print(found: experience_pb2.LedgerResponse, wrong: list[str], *, by_version: bool) -> None:
    from rich.console import Console

    from forebay.obs.accounts import accounts, accounts_table

    console = Console(highlight=False)
    console.print(accounts_table(accounts(found.rows, by_version=by_version)))
    console.print(
        f"groups: {found.groups_started} started, {found.groups_refunded} refunded, "
        f"{found.permits_outstanding} being generated"
    )
    for line in wrong:
        console.print(f"does not balance: {line}", style="bold red")
    if not wrong:
        console.print("balanced: produced = trained + buffered + leased + dropped", style="green")
