"""`[reward]` of the run file: what is right, and one line for what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.config.identity import differences, run_json
from forebay.config.load import load
from forebay.config.toml_text import toml_text
from forebay.errors import UsageError
from tests.core.run_files import loaded

MODEL = '[reward.models.m]\npath = "x"\naddress = "127.0.0.1:7090"\n'
MISTAKES = [
    ("[reward]\nrule = 1", "unknown key reward.rule; expected one of rule_weight, patience_s, heldout, models"),
    ("[reward]\npatience_s = 0", "reward.patience_s is 0; expected a number above 0"),
    ("[reward]\nrule_weight = nan", "reward.rule_weight is nan; expected a number"),
    ("[reward]\nmodels = 1", "reward.models is 1; expected a table"),
    ("[reward.models]\nm = 1", "reward.models.m is 1; expected a table with path, address"),
    ('[reward.models.m]\npath = "x"', "key reward.models.m.address is missing; expected HOST:PORT"),
    (MODEL + 'adress = "h:1"', "unknown key reward.models.m.adress; did you mean address?"),
    (MODEL + "weight = inf", "reward.models.m.weight is inf; expected a number"),
    (MODEL + "max_tokens = 0", "reward.models.m.max_tokens is 0; expected a whole number above 0"),
    (
        MODEL + 'dtype = "fp8"',
        'reward.models.m.dtype is "fp8"; expected one of "auto", "float32", "bfloat16", "float16"',
    ),
    (MODEL.replace("7090", "x"), 'reward.models.m.address is "127.0.0.1:x"; expected HOST:PORT'),
    (MODEL.replace(".m]", '."a b"]'), "reward.models.a b: expected a name of letters, digits, - and _"),
    (MODEL.replace(".m]", ".rule]"), "reward.models.rule is the name of the task's own score; expected another name"),
    (MODEL + 'http = "127.0.0.1:7090"', "reward.models.m.http and reward.models.m.address are both 127.0.0.1:7090"),
    (MODEL + MODEL.replace(".m]", ".n]"), "reward.models.n.address and reward.models.m.address are both"),
    ("[reward]\nrule_weight = 0", "reward.rule_weight is 0 and no reward model counts: every reward would be 0"),
    (MODEL + "weight = 0\n[reward]\nrule_weight = 0", "reward.rule_weight is 0 and no reward model counts"),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES, ids=[text.splitlines()[-1] for text, _ in MISTAKES])
def test_a_mistake_is_told_with_its_file_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'run.toml'}: {expected}")
    assert "\n" not in str(caught.value)


def test_a_model_is_read_from_file_environment_and_flags_and_written_back(tmp_path: Path) -> None:
    run = loaded(
        tmp_path, MODEL, {"FOREBAY_REWARD__MODELS__M__WEIGHT": "0.5"}, reward__models__m__address="10.0.0.1:7090"
    )
    model = run.reward.models["m"]
    assert (model.path, model.weight, model.address, model.http) == ("x", 0.5, "10.0.0.1:7090", None)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(toml_text(run.model_dump(mode="json")))
    assert load([resolved], {}) == run


def test_what_a_reply_is_worth_is_part_of_what_the_run_is(tmp_path: Path) -> None:
    one, other = (run_json(loaded(tmp_path, MODEL + f"weight = {weight}")) for weight in (1.0, 2.0))
    assert differences(one, other) == ["reward.models.m.weight: 1.0 in the run, 2.0 here"]
    patient = run_json(loaded(tmp_path, MODEL + "weight = 1.0\n[reward]\npatience_s = 600"))
    assert differences(one, patient) == []
