"""`forebay plot`: a run as one PNG."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.cli.arguments import Subparsers, add_command, add_run_files, load_run
from forebay.cli.ask import NoBuffer, ask
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.config.models import RunFile
    from forebay.obs.history import History


def add(subparsers: Subparsers) -> None:
    """The command."""
    parser = add_command(
        subparsers,
        "plot",
        plot,
        summary="draw reward, held-out score, staleness, KL, throughput and seconds by cause over steps",
        example="forebay plot run.toml --out curve.png",
    )
    add_run_files(parser)
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="where; default plot.png in the run folder")


def plot(arguments: argparse.Namespace) -> int:
    """Draw from the running buffer, else from what the learner wrote. Raises UsageError."""
    from forebay.obs.plot import draw

    run = load_run(arguments)
    print(draw(read_history(run), arguments.out or run.run.home / "plot.png", run.run.name))
    return 0


def read_history(run: RunFile) -> History:
    """The run's history from its buffer if one answers, else from the run folder. Raises UsageError without either."""
    from forebay.obs.history import from_metrics_file, from_response

    try:
        status, response = ask(run.sampler_target, lambda buffer: (buffer.status(), buffer.history()), run.run.name)
    except NoBuffer:
        status = None
    if status is not None and status.run == run.run.name:
        return from_response(response)
    written = run.run.home / "learner" / "metrics.jsonl"
    if not written.exists():
        raise UsageError(
            f"no run to plot: no buffer of {run.run.name} answers at {run.sampler_target}, and no {written}"
        )
    return from_metrics_file(written)
