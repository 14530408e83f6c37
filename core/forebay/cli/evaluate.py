"""`forebay eval`: score a checkpoint on the held-out part."""

from __future__ import annotations

import argparse
import json

from forebay.cli.arguments import Subparsers, add_command, add_run_files, load_run
from forebay.cli.services import NEEDED, require
from forebay.cli.threads import settle_own_threads


def add(subparsers: Subparsers) -> None:
    """The command."""
    parser = add_command(
        subparsers,
        "eval",
        evaluate,
        summary="score a checkpoint on the task's held-out part, greedily",
        example="forebay eval run.toml --checkpoint runs/quickstart/learner/checkpoints/step_000060",
    )
    add_run_files(parser)
    parser.add_argument("--checkpoint", metavar="FOLDER", help="default: the untrained model of the run file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def evaluate(arguments: argparse.Namespace) -> int:
    """Print score, standard error and number of prompts. Raises UsageError."""
    from forebay.config.model_source import model_source
    from forebay.obs.log import setup_logging
    from forebay.obs.wire_json import plain

    run = load_run(arguments)
    require("sampler", NEEDED["sampler"])
    setup_logging("eval", run.observe.log_level)
    settle_own_threads(run.sampler.cpu_threads, alone=True)
    if arguments.checkpoint is None:
        model_source(run.model, run.run.seed)
    from forebay.sampler.evaluate import evaluate as score

    result = score(run, arguments.checkpoint)
    if arguments.json:
        print(json.dumps(plain(result)))
    else:
        print(f"held-out score {result.score:.3f} ± {result.stderr:.3f} on {result.prompts} prompts")
    return 0
