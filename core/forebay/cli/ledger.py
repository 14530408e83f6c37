"""`forebay ledger`: what became of everything that was produced; exit code 1 when it does not add up."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from forebay.cli.arguments import Subparsers, add_buffer_address, add_command, buffer_address, load_run
from forebay.cli.ask import NoBuffer, ask
from forebay.errors import EXIT_DONE, EXIT_FAILED

if TYPE_CHECKING:
    from rich.table import Table

    from forebay.obs.balance import Account
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
    from forebay.obs.balance import accounts, by_fleet, unbalanced

    found = read_ledger(arguments)
    wrong = unbalanced(found.rows)
    if arguments.json:
        from forebay.obs.wire_json import plain

        print(json.dumps({**plain(found), "balanced": not wrong}))
    else:
        each = accounts(found.rows)
        _print(each if arguments.versions else by_fleet(each), wrong, found.permits_outstanding)
    return EXIT_FAILED if wrong else EXIT_DONE


def read_ledger(arguments: argparse.Namespace) -> experience_pb2.LedgerResponse:
    """From the running buffer, else from the journal in the run folder. Raises NoBuffer, or what the journal raises."""
    address = buffer_address(arguments)
    try:
        return ask(address, lambda buffer: buffer.ledger())
    except NoBuffer:
        if not arguments.run_files or arguments.connect:
            raise
        journal = load_run(arguments).run.home / "buffer" / "journal"
        if not journal.exists():
            raise
        from forebay.buffer.offline import read_ledger as read_offline

        return read_offline(load_run(arguments))


def _print(shown: list[Account], wrong: list[Account], permits: int) -> None:
    from rich.console import Console

    console = Console()
    console.print(_table(shown))
    console.print(f"{permits} groups are being generated", highlight=False)
    for account in wrong:
        lacks = account.missing
        console.print(
            f"does not balance: fleet {account.fleet}, version {account.version}: "
            f"{lacks.groups} groups, {lacks.trajectories} trajectories, {lacks.tokens} tokens unaccounted for",
            style="bold red",
        )
    if not wrong:
        console.print("balanced: produced = trained + buffered + leased + dropped", style="green", highlight=False)


def _table(shown: list[Account]) -> Table:
    from rich.table import Table

    reasons = sorted({reason for account in shown for reason in account.dropped})
    states = ["produced", "trained", "buffered", "leased", *(f"dropped:{reason}" for reason in reasons)]
    table = Table(box=None, pad_edge=False, header_style="bold", title="groups (tokens)", title_justify="left")
    table.add_column("fleet")
    table.add_column("version", justify="right")
    for state in states:
        table.add_column(state.replace(":", ": "), justify="right")
    for account in shown:
        cells = (account.states.get(state) for state in states)
        words = (f"{amount.groups} ({amount.tokens})" if amount is not None else "–" for amount in cells)
        table.add_row(account.fleet, str(account.version or "all"), *words)
    return table
