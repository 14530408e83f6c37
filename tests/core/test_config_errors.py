"""Every mistake in a run file is one line: source, key, what was got, what is expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.config.load import load
from forebay.errors import UsageError
from tests.core.run_files import SMALLEST, loaded

MISTAKES = [
    ("[learner]\nlrr = 1", "unknown key learner.lrr; did you mean learner.lr?"),
    ("[lerner]\nlr = 1", "unknown section [lerner]; did you mean learner?"),
    ("[sampler]\nlr = 1", "unknown key sampler.lr; did you mean learner.lr?"),
    ("[fleet]\nzzz = 1", "unknown key fleet.zzz; expected one of samplers, max_restarts"),
    ('[learner]\nlr = "fast"', 'learner.lr is "fast"; expected a number of at least 0'),
    ("[learner]\nsteps = 0", "learner.steps is 0; expected a whole number above 0"),
    ("[learner]\nsteps = 1.5", "learner.steps is 1.5; expected a whole number above 0"),
    ("[learner]\nzero_stage = 4", "learner.zero_stage is 4; expected one of 0, 1, 2, 3"),
    ("[learner]\nbetas = [0.9]", "learner.betas is [0.9]; expected a list of 2 numbers"),
    ('[learner]\ncompute_dtype = "fp16"', 'compute_dtype is "fp16"; expected one of "float32", "bfloat16"'),
    ('[buffer]\nlisten = "7070"', 'buffer.listen is "7070"; expected HOST:PORT'),
    ("[sampler]\ntop_p = 2", "sampler.top_p is 2; expected a number above 0 and of at most 1"),
    ("[sampler]\nengine = 1", "sampler.engine is 1; expected a table"),
    ("[sampler]\nstop = [1]", "sampler.stop is [1]; expected a list"),
    ("[observe]\nplot = 3", "observe.plot is 3; expected true or false"),
    ("[sampler.engine]\nseed = 1", "sampler.engine.seed is forebay's own"),
    ("[learner.deepspeed]\nbf16 = {}", "learner.deepspeed.bf16 is forebay's own"),
    ("[learner]\nmax_staleness = 0\n[publish]\nevery_steps = 2", "would wait for ever; expected at least 1"),
    ("[learner\n", "not valid TOML"),
    ("[learner]\nlr = 1\nlr = 2\n", "(at line 9, column 7)"),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES, ids=[text.split("\n")[1] or text for text, _ in MISTAKES])
def test_a_mistake_is_told_with_its_file_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, text)
    told = str(caught.value)
    assert expected in told
    assert told.startswith(str(tmp_path / "run.toml"))
    assert "\n" not in told


def test_a_misspelt_key_goes_before_the_one_it_leaves_missing(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(SMALLEST.replace("path =", "pathh ="))
    with pytest.raises(UsageError, match=r"unknown key model\.pathh; did you mean model\.path\? \(and 1 more\)"):
        load([path], {})


def test_missing_sections_and_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(SMALLEST.partition("[task]")[0])
    with pytest.raises(UsageError, match=r"section \[task\] is missing; expected a section with name, options"):
        load([path], {})
    path.write_text(SMALLEST.replace('path = "./model"', ""))
    with pytest.raises(UsageError, match=r"key model\.path is missing; expected text"):
        load([path], {})


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "quick.toml").touch()
    with pytest.raises(UsageError, match=r"qick\.toml: no such run file; there is .*quick\.toml"):
        load([tmp_path / "qick.toml"], {})


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(UsageError, match="byte 8 is not UTF-8"):
        load([tmp_path / "run.toml"], {})


def test_a_folder_instead_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the run file: Is a directory"):
        load([tmp_path], {})


def test_mistakes_in_variables_and_flags_name_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^FOREBAY_LEARNER__LRR: unknown key learner\.lrr"):
        loaded(tmp_path, environ={"FOREBAY_LEARNER__LRR": "1"})
    with pytest.raises(UsageError, match=r'^--learner\.steps: learner\.steps is "x"; expected a whole number'):
        loaded(tmp_path, learner__steps="x")


def test_a_single_underscore_is_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"FOREBAY_LEARNER_LR: .*: FOREBAY_LEARNER__LR$"):
        loaded(tmp_path, environ={"FOREBAY_LEARNER_LR": "1", "FOREBAY_DEBUG": "1"})
