"""`forebay buffer | learner | sampler`: one service in this process."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.cli.arguments import Subparsers, add_command, add_run_files, load_run, run_flags
from forebay.cli.threads import settle_own_threads
from forebay.errors import EXIT_DONE, EXIT_FAILED, UsageError
from forebay.rank import is_launched, rank, ranks, ranks_here

if TYPE_CHECKING:
    from forebay.config.models import RunFile

#: What a role cannot start without, of what its extra installs.
NEEDED = {
    "sampler": ("vllm", "transformers"),
    "learner": ("torch", "deepspeed", "transformers"),
    "reward": ("torch", "transformers"),
}
ADDRESS = r"[^\s:]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}"
SAMPLER_SHORTHANDS = ("connect", "id", "fleet", "region")


def add(subparsers: Subparsers) -> None:
    """The three services."""
    buffer = add_command(
        subparsers,
        "buffer",
        buffer_command,
        summary="the reservoir: takes in groups, leases batches, keeps weights",
        example="forebay buffer run.toml --buffer.listen 0.0.0.0:7070 --security.insecure true",
    )
    learner = add_command(
        subparsers,
        "learner",
        learner_command,
        summary="the DeepSpeed learner: leases batches, trains, publishes weights",
        example="forebay learner run.toml --learner.connect 10.0.0.5:7070",
    )
    sampler = add_command(
        subparsers,
        "sampler",
        lambda arguments: serve("sampler", arguments),
        summary="a vLLM sampler: start as many as you like, anywhere",
        example="forebay sampler run.toml --connect 10.0.0.5:7070 --region eu-west",
    )
    for parser in (buffer, learner, sampler):
        add_run_files(parser)
    buffer.add_argument(
        "--verify",
        action="store_true",
        help="serve nothing: check the journal and weights of run.toml, or of a run folder; exit code 1 if damaged",
    )
    buffer.add_argument(
        "--also",
        action="append",
        default=[],
        type=Path,
        metavar="OTHER.toml",
        help="serve this run too, on the same addresses, in its own folder and within its own quotas; repeatable",
    )
    buffer.add_argument(
        "--upstream",
        metavar="HOST:PORT",
        help="be a relay in front of a site: mirror the weights of the buffer there, pass all else on to it",
    )
    _add_shorthands(sampler)


def buffer_command(arguments: argparse.Namespace) -> int:
    """Serve, relay or verify. Raises UsageError."""
    if arguments.verify:
        return verify(arguments)
    return relay(arguments) if arguments.upstream else serve("buffer", arguments)


def learner_command(arguments: argparse.Namespace) -> int:
    """Serve as one rank, or start all ranks that the run file wants. Raises UsageError."""
    run, started = load_run(arguments), is_launched()
    if not started and (run.learner.ranks > 1 or run.learner.launcher == "ray"):
        return _start_ranks(run, arguments)
    if started and run.learner.ranks not in (1, ranks()):
        raise UsageError(
            f"learner.ranks is {run.learner.ranks}, but {ranks()} were started; leave it out, or start as many"
        )
    return serve("learner", arguments)


def _start_ranks(run: RunFile, arguments: argparse.Namespace) -> int:
    from forebay.config.home import prepare_home
    from forebay.config.model_source import model_source
    from forebay.fleet.ranks import run_ranks

    require("learner", NEEDED["learner"])
    prepare_home(run)
    model_source(run.model, run.run.seed)  # here, so that not every rank makes it
    flags = [word for flag in run_flags(arguments) for word in flag.arguments]
    words = ["-m", "forebay.cli.main", "learner", *map(str, arguments.run_files), *flags]
    if run.learner.launcher == "ray":
        require("ray", ("ray",))
        from forebay.fleet.ray_ranks import run_ranks_on_ray

        return run_ranks_on_ray(words, run.learner.ranks, run.learner.cpu_threads or 1)
    return run_ranks([sys.executable, *words], run.learner.ranks)


def relay(arguments: argparse.Namespace) -> int:
    """Run a relay until it is told to stop; returns its exit code. Raises UsageError."""
    from forebay.config.home import prepare_home, store_resolved
    from forebay.obs.log import setup_logging

    if arguments.also:
        raise UsageError("--also: a relay serves one run; start another relay for the other one")
    if re.fullmatch(ADDRESS, arguments.upstream) is None:
        raise UsageError(f"--upstream: got {arguments.upstream!r}, expected HOST:PORT of the buffer to relay")
    run = load_run(arguments)
    own_folder = run.publish.model_copy(update={"store": ""})  # what several buffers tidied up would be nobody's
    run = run.model_copy(update={"publish": own_folder})
    setup_logging("relay", run.observe.log_level)
    prepare_home(run)
    store_resolved(run)
    entry: Callable[..., int] = importlib.import_module("forebay.buffer.relay").serve
    return entry(run, arguments.upstream)


def serve(role: str, arguments: argparse.Namespace) -> int:
    """Run a service until it is done or drained; returns its exit code. Raises UsageError."""
    from forebay.config.home import prepare_home, store_resolved
    from forebay.config.model_source import model_source
    from forebay.obs.log import setup_logging

    run = load_run(arguments)
    require(role, NEEDED.get(role, ()))
    setup_logging(*_log_settings(role, run))
    prepare_home(run)
    if role == "buffer":
        store_resolved(run)
    else:
        model_source(run.model, run.run.seed)
    others = [_load_other(path) for path in arguments.also] if role == "buffer" else []
    settle_own_threads(
        {"sampler": run.sampler.cpu_threads, "learner": run.learner.cpu_threads}.get(role),
        processes=ranks_here(),
    )
    # Last: importing a service may take many seconds, and mistakes should be told at once.
    entry: Callable[..., int] = importlib.import_module(f"forebay.{role}.service").serve
    return entry(run, *others)


def _log_settings(role: str, run: RunFile) -> tuple[str, str]:
    """The name before each line, and the level. What all ranks of a learner do, its lead tells alone."""
    if role == "learner" and rank() > 0:
        return f"learner.{rank()}", "warning"
    return run.sampler.id or role if role == "sampler" else role, run.observe.log_level


def _load_other(path: Path) -> RunFile:
    """Another run of the same buffer; dotted flags are the first one's."""
    from forebay.config.home import prepare_home, store_resolved
    from forebay.config.load import load

    run = load([path], os.environ, [])
    prepare_home(run)
    store_resolved(run)
    return run


def verify(arguments: argparse.Namespace) -> int:
    """Check the runs' buffer folders, beside their buffer or without; 0 when all are whole. Raises UsageError."""
    from forebay.buffer.verify import Verification

    damaged = 0
    for home in _homes(arguments):
        verification = Verification(home, print)
        whole = verification.run()
        damaged += not whole
        print(f"{home}: whole" if whole else f"{home}: DAMAGED, {len(verification.problems)} found")
    return EXIT_FAILED if damaged else EXIT_DONE


def _homes(arguments: argparse.Namespace) -> Iterator[Path]:
    """The run folders that a command line names, as run files or by themselves; nothing is made there."""
    from forebay.config.load import load

    first: Path = arguments.run_files[0]
    yield first if first.is_dir() else load_run(arguments).run.home
    for path in arguments.also:
        yield path if path.is_dir() else load([path], os.environ, []).run.home


def require(extra: str, modules: tuple[str, ...]) -> None:
    """Raises UsageError, naming the extra to install, when a module is missing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(f'the {extra} needs {", ".join(missing)}: pip install "forebay[{extra}]"')


def _add_shorthands(parser: argparse.ArgumentParser) -> None:
    for key in SAMPLER_SHORTHANDS:
        shown = "HOST:PORT" if key == "connect" else key.upper()
        parser.add_argument(f"--{key}", metavar=shown, action=_Shorthand, help=f"short for --sampler.{key}")


class _Shorthand(argparse.Action):
    """`--region eu` is `--sampler.region eu`."""

    def __call__(
        self, _parser: object, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        namespace.dotted = [*namespace.dotted, (f"sampler.{self.dest}", str(values), option or self.dest)]
