"""The `forebay` command as people meet it: real processes, exit codes, one line on standard error."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from forebay.cli.arguments import split_dotted
from forebay.cli.main import build_parser, main, parse
from forebay.errors import UsageError
from tests.core.run_files import write

SERVICES = ["run", "buffer", "learner", "sampler"]
COMMANDS = [
    *SERVICES,
    "reward",
    "reference",
    "status",
    "top",
    "ledger",
    "pause",
    "resume",
    "drain",
    "weights",
    "eval",
    "plot",
    "config",
    "doctor",
    "replay",
]


def forebay(*words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "forebay.cli.main", *words],
        cwd=cwd,
        env={**os.environ, "FOREBAY_DEBUG": "0", **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_usage_error(result: subprocess.CompletedProcess[str], *expected: str) -> None:
    """Exit code 2 and one line that says everything expected."""
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("forebay: ")
    assert result.stderr.count("\n") == 1
    for part in expected:
        assert part in result.stderr


@pytest.mark.parametrize("role", ["buffer", "sampler", "learner", "run"])
def test_a_typo_in_the_run_file(tmp_path: Path, role: str) -> None:
    write(tmp_path, "[learner]\nlrr = 1")
    assert_usage_error(forebay(role, "run.toml", cwd=tmp_path), "run.toml", "learner.lrr", "did you mean learner.lr?")


def test_a_typo_in_a_flag(tmp_path: Path) -> None:
    write(tmp_path)
    result = forebay("learner", "run.toml", "--learner.step", "3", cwd=tmp_path)
    assert_usage_error(result, "--learner.step: unknown key learner.step; did you mean learner.steps?")


def test_a_missing_run_file(tmp_path: Path) -> None:
    write(tmp_path)
    assert_usage_error(forebay("buffer", "rum.toml", cwd=tmp_path), "rum.toml: no such run file; there is run.toml")


def test_a_missing_model(tmp_path: Path) -> None:
    write(tmp_path)
    for role in ("sampler", "learner", "run"):
        assert_usage_error(forebay(role, "run.toml", cwd=tmp_path), 'model.path is "./model": no such folder')


def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    write(tmp_path)
    result = forebay("buffer", "run.toml", "--run.folder", "/proc/forebay", cwd=tmp_path)
    assert_usage_error(result, "run folder /proc/forebay", "set run.folder")


def test_a_port_in_use_names_its_holder(tmp_path: Path) -> None:
    write(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = forebay("buffer", "run.toml", f"--buffer.listen={address}", cwd=tmp_path)
    assert_usage_error(result, address, "in use", f"pid {os.getpid()}")


def test_a_role_whose_extra_is_missing(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name in ('vllm', 'deepspeed') else found(name, *rest)\n"
    )
    for role in ("sampler", "learner"):
        result = forebay(role, "run.toml", cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert_usage_error(result, f'pip install "forebay[{role}]"')


def test_no_buffer_is_a_failure_not_a_usage_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    for words in (("status",), ("ledger",), ("pause",), ("drain",), ("top",)):
        result = forebay(*words, "--connect", address, cwd=tmp_path)
        assert result.returncode == 1
        assert result.stderr == (
            f"forebay: no buffer answers at {address} (connection refused); start one: forebay buffer run.toml\n"
        )


def test_status_without_a_buffer_to_ask(tmp_path: Path) -> None:
    assert_usage_error(forebay("status", cwd=tmp_path), "expected a run file or --connect HOST:PORT")


def test_plot_without_a_run(tmp_path: Path) -> None:
    write(tmp_path, '[buffer]\nlisten = "127.0.0.1:1"\n')
    assert_usage_error(forebay("plot", "run.toml", cwd=tmp_path), "no run to plot", "metrics.jsonl")


def test_verify_and_replay_without_a_run(tmp_path: Path) -> None:
    write(tmp_path)
    for words in (("buffer", "run.toml", "--verify"), ("replay", "run.toml", "--to", "x.arrow")):
        assert_usage_error(forebay(*words, cwd=tmp_path), "runs/small/buffer/journal: no journal here")


def test_replay_must_be_told_what_to_do(tmp_path: Path) -> None:
    write(tmp_path)
    assert_usage_error(forebay("replay", "run.toml", cwd=tmp_path), "one of the arguments --to --train is required")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = forebay("config", "check", "missing.toml", cwd=tmp_path, FOREBAY_DEBUG="1")
    assert result.returncode == 2
    assert "Traceback" in result.stderr


def test_config_show_is_a_run_file(tmp_path: Path) -> None:
    write(tmp_path)
    shown = forebay("config", "show", "run.toml", "--learner.lr=2e-6", cwd=tmp_path, FOREBAY_LEARNER__STEPS="7")
    tree = tomllib.loads(shown.stdout)
    assert (tree["learner"]["lr"], tree["learner"]["steps"]) == (2e-6, 7)
    (tmp_path / "shown.toml").write_text(shown.stdout)
    assert forebay("config", "check", "shown.toml", cwd=tmp_path).stdout == "shown.toml: valid, run small\n"


def test_config_schema_is_json(tmp_path: Path) -> None:
    assert "learner" in json.loads(forebay("config", "schema", cwd=tmp_path).stdout)["properties"]


def test_an_unknown_command(tmp_path: Path) -> None:
    assert_usage_error(forebay("statsu", cwd=tmp_path), "unknown command statsu; did you mean status")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "example:" in shown or "check" in shown


def test_help_lists_every_command() -> None:
    shown = build_parser().format_help()
    assert all(command in shown for command in COMMANDS)


def test_dotted_flags_are_taken_from_anywhere() -> None:
    rest, dotted = split_dotted(["run", "--a.b", "-1", "run.toml", "--c.d=x=y", "--fresh"])
    assert rest == ["run", "run.toml", "--fresh"]
    assert dotted == [("a.b", "-1", "--a.b"), ("c.d", "x=y", "--c.d")]


def test_a_dotted_flag_needs_a_value() -> None:
    with pytest.raises(UsageError, match=r"expected a value, --learner\.lr=VALUE"):
        split_dotted(["learner", "run.toml", "--learner.lr"])


def test_the_samplers_shorthands_are_dotted_flags() -> None:
    arguments = parse(["sampler", "run.toml", "--connect", "h:1", "--region=eu", "--sampler.id", "x"])
    assert arguments.dotted == [
        ("sampler.connect", "h:1", "--connect"),
        ("sampler.region", "eu", "--region"),
        ("sampler.id", "x", "--sampler.id"),
    ]


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_argv: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("forebay.cli.main.parse", interrupted)
    assert main([]) == 130


def test_an_unforeseen_error_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_argv: object) -> None:
        raise RuntimeError("line one\nline two")

    monkeypatch.setattr("forebay.cli.main.parse", broken)
    monkeypatch.delenv("FOREBAY_DEBUG", raising=False)
    assert main([]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "RuntimeError at " in told
    assert "line one line two" in told
