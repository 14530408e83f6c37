"""`forebay replay`: a run's journal, read back as rows or trained again."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.cli.arguments import Subparsers, add_command, add_run_files, load_run, run_flags
from forebay.cli.services import NEEDED, require
from forebay.config.checkpoints import complete_steps, folder_of, name_of
from forebay.errors import EXIT_DONE, EXIT_FAILED, UsageError

if TYPE_CHECKING:
    from forebay.buffer.recording import Recording
    from forebay.buffer.replay import Steps
    from forebay.config.models import RunFile


def add(subparsers: Subparsers) -> None:
    """The command."""
    parser = add_command(
        subparsers,
        "replay",
        replay,
        summary="read a run's experience back as Arrow or Parquet rows, or train it again and compare the weights",
        example="forebay replay run.toml --to experience.parquet --steps 1:10\n  forebay replay run.toml --train",
    )
    add_run_files(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", type=Path, metavar="FILE", help="write rows to FILE.parquet or FILE.arrow")
    what.add_argument(
        "--train",
        action="store_true",
        help="give the recorded batches to a fresh learner; exit code 1 unless every published version is the same",
    )
    parser.add_argument(
        "--steps", metavar="A:B", help="only these steps; default: all. Training starts at 1 or a checkpoint"
    )
    parser.add_argument(
        "--into", type=Path, metavar="FOLDER", help="run folder of the replay; default RUN_FOLDER-replay"
    )


def replay(arguments: argparse.Namespace) -> int:
    """Export or train. Raises UsageError, JournalDamaged."""
    from forebay.buffer.recording import read_recording
    from forebay.buffer.replay import Steps

    steps = Steps.parse(arguments.steps) if arguments.steps else Steps()
    home = _home(arguments)
    recording = read_recording(home)
    if arguments.to is not None:
        return _export(recording, arguments.to, steps)
    return _train(recording, home, arguments, steps)


def _home(arguments: argparse.Namespace) -> Path:
    """The recorded run's folder; a folder in place of a run file is that, and holds its own run file."""
    from forebay.config.home import RESOLVED

    given: Path = arguments.run_files[0]
    if not given.is_dir():
        return load_run(arguments).run.home
    arguments.run_files = [given / RESOLVED]
    return given


def _export(recording: Recording, target: Path, steps: Steps) -> int:
    from forebay.buffer.replay import export

    found = export(recording, target, steps)
    print("\n".join([f"{target}: {line}" if not at else line for at, line in enumerate(found.in_words(recording))]))
    return EXIT_FAILED if found.unreadable else EXIT_DONE


def _train(recording: Recording, home: Path, arguments: argparse.Namespace, steps: Steps) -> int:
    require("learner", NEEDED["learner"])
    from forebay.buffer.recording import read_recording
    from forebay.buffer.replay_journal import choose_steps
    from forebay.fleet.replay import train_again

    chosen = choose_steps(recording, steps, complete_steps(home))
    run, words = _replay_run(arguments, arguments.into or home.with_name(f"{home.name}-replay"), recording)
    _prepare(run, home, recording, chosen)
    print(f"replaying steps {chosen[0]} to {chosen[-1]} of {home} in {run.run.home}")
    code = train_again(run, words, chosen[-1])
    return code or _compare(recording, read_recording(run.run.home), chosen)


def _replay_run(arguments: argparse.Namespace, into: Path, recording: Recording) -> tuple[RunFile, list[str]]:
    """The recorded run in a folder of its own, at addresses of its own, and the words that say so to a service."""
    from forebay.config.identity import differences, run_json
    from forebay.config.load import load
    from forebay.config.sources import Flag
    from forebay.loopback import free_addresses

    grpc, http = free_addresses(2)
    own = {"run.folder": str(into), "buffer.listen": grpc, "buffer.http": http}
    own |= {"learner.connect": grpc, "sampler.connect": grpc}
    flags = [*run_flags(arguments), *(Flag(key=key, text=text, origin=f"--{key}") for key, text in own.items())]
    run = load(arguments.run_files, os.environ, flags)
    diff = differences(recording.run_json, run_json(run))
    if diff:
        raise UsageError(f"the recorded run had other settings, replay it with those: {'; '.join(diff)}")
    return run, [*map(str, arguments.run_files), *(word for flag in flags for word in flag.arguments)]


def _prepare(run: RunFile, home: Path, recording: Recording, steps: range) -> None:
    """A run folder with the journal, and the checkpoint that the learner starts from. Raises UsageError."""
    from forebay.buffer.replay_journal import write_journal
    from forebay.config.home import prepare_home
    from forebay.config.steering import Steering

    journal = prepare_home(run) / "buffer" / "journal"
    if journal.exists():
        raise UsageError(f"{run.run.home} holds a run already: remove it, or give another folder with --into")
    journal.mkdir(parents=True)
    write_journal(recording, steps, journal)
    if steps[0] > 1:
        name = name_of(steps[0] - 1)
        shutil.copytree(folder_of(home) / name, folder_of(run.run.home) / name)
    Steering.read(home).write(run.run.home)  # what was changed on the way is changed again


def _compare(recorded: Recording, replayed: Recording, steps: range) -> int:
    """Print whether each version that both published has the same weights; 1 when one has not, or none was."""
    told: dict[int, bool] = {}
    for step in (steps[0] - 1, *steps):
        before, after = recorded.published.get(step), replayed.published.get(step)
        if before is None or after is None:
            continue  # not every step is published, and a slow link skips some
        told[step] = before == after
        print(f"step {step}: {'same weights' if told[step] else 'differs'}")
    print(_verdict(told))
    return EXIT_DONE if told and all(told.values()) else EXIT_FAILED


def _verdict(told: Mapping[int, bool]) -> str:
    differing = [step for step, same in told.items() if not same]
    if differing:
        return f"{len(differing)} of {len(told)} versions differ, the first is step {differing[0]}"
    return f"all {len(told)} versions are the same, bit for bit" if told else "both published no version of one step"
