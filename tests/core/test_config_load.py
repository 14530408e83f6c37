"""Precedence, values of flags and variables, and the way back to TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay.config.home import RESOLVED, prepare_home, store_resolved
from forebay.config.load import load
from forebay.config.models import RunFile
from forebay.config.sources import Flag
from forebay.config.toml_text import toml_text
from tests.core.run_files import loaded, write


def test_files_then_environment_then_flags(tmp_path: Path) -> None:
    first = write(tmp_path, "[learner]\nlr = 1.0\nsteps = 1\ngroup_size = 2\nepochs = 5\n")
    second = tmp_path / "more.toml"
    second.write_text("[learner]\nlr = 2.0\nsteps = 2\ngroup_size = 3\n")
    environ = {"FOREBAY_LEARNER__LR": "3.0", "FOREBAY_LEARNER__STEPS": "3"}
    run = load([first, second], environ, [Flag(key="learner.lr", text="4.0", origin="--learner.lr")])
    assert (run.learner.lr, run.learner.steps, run.learner.group_size, run.learner.epochs) == (4.0, 3, 3, 5)


def test_the_last_of_two_flags_wins(tmp_path: Path) -> None:
    flags = [Flag(key="learner.lr", text=text, origin="--learner.lr") for text in ("1e-3", "1e-4")]
    assert load([write(tmp_path)], {}, flags).learner.lr == 1e-4


def test_values_are_toml_and_plain_words_are_text(tmp_path: Path) -> None:
    run = loaded(
        tmp_path,
        learner__drop_overlong="true",
        sampler__stop='["\\n", "END"]',
        sampler__fleet="spot",
        sampler__engine__max_model_len="64",
        sampler__engine__dtype="float32",
        learner__deepspeed__zero_optimization__overlap_comm="true",
    )
    assert run.learner.drop_overlong is True
    assert run.sampler.stop == ["\n", "END"]
    assert run.sampler.fleet == "spot"
    assert run.sampler.engine == {"max_model_len": 64, "dtype": "float32"}
    assert run.learner.deepspeed == {"zero_optimization": {"overlap_comm": True}}


def test_what_looks_like_a_number_stays_text_where_text_belongs(tmp_path: Path) -> None:
    run = loaded(tmp_path, run__name="2024", sampler__id="7", environ={"FOREBAY_SAMPLER__REGION": "1e5"})
    assert (run.run.name, run.sampler.id, run.sampler.region) == ("2024", "7", "1e5")


def test_a_value_cannot_bring_further_keys(tmp_path: Path) -> None:
    assert loaded(tmp_path, sampler__fleet='"a"\nlearner = 5').sampler.fleet == '"a"\nlearner = 5'


def test_tables_of_file_and_flag_are_merged(tmp_path: Path) -> None:
    run = loaded(tmp_path, "[sampler.engine]\nmax_num_seqs = 4\n", sampler__engine__block_size="16")
    assert run.sampler.engine == {"max_num_seqs": 4, "block_size": 16}


def test_the_resolved_run_file_gives_the_same_run(tmp_path: Path) -> None:
    run = loaded(
        tmp_path, "[task.options]\nmin = 1\nwords = ['a', \"b'\\u007f\"]\n", run__folder=str(tmp_path / "home")
    )
    prepare_home(run)
    stored = store_resolved(run)
    assert stored.name == RESOLVED
    assert load([stored], {}) == run


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=5))
def test_toml_text_is_read_back_as_it_was(tree: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(tree)) == tree


@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False))
def test_every_float_survives_a_flag(lr: float) -> None:
    from forebay.config.keys import run_file_keys
    from forebay.config.sources import parse_value

    assert parse_value(repr(lr), ("learner", "lr"), run_file_keys()) == lr


def test_defaults_are_valid() -> None:
    minimal = {"run": {"name": "x"}, "model": {"path": "x"}, "task": {"name": "x"}}
    assert RunFile.model_validate(minimal).learner.max_staleness >= 0
