"""A model is a folder, is made once, or is a name; anything else is one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forebay.config.model_source import in_hub_cache, looks_local, model_source
from forebay.config.models import ModelSection
from forebay.errors import UsageError

MAKER = """
import os, pathlib, time
def make(folder, seed):
    folder.mkdir()
    (folder / "config.json").write_text(str(seed))
    with open(os.environ["CALLS"], "a") as calls:
        calls.write("x")
def make_nothing(folder, seed):
    folder.mkdir()
"""


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stand_in_maker.py").write_text(MAKER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_a_checkpoint_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert model_source(ModelSection(path=str(tmp_path)), 0) == str(tmp_path)


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no checkpoint there \(config\.json is missing\)"):
        model_source(ModelSection(path=str(tmp_path)), 0)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"model\.path is .*no such folder; expected a checkpoint folder or a hub name"
    ):
        model_source(ModelSection(path=str(tmp_path / "missing")), 0)


@pytest.mark.parametrize("path", ["/x/y", "./x", "../x", "~/x", "a/b/c", "models/x/"])
def test_what_can_only_be_a_folder(path: str) -> None:
    assert looks_local(path)


@pytest.mark.parametrize("path", ["gpt2", "org/name", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_what_may_be_a_hub_name(path: str) -> None:
    assert not looks_local(path)


def test_a_name_in_the_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert in_hub_cache("org/name")
    assert model_source(ModelSection(path="org/name"), 0) == "org/name"


def test_an_unknown_name_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match=r'model\.path is "models/tiny": no such folder, not in the cache'):
        model_source(ModelSection(path="models/tiny"), 0)


def test_a_missing_model_is_made_with_the_seed(maker: Path) -> None:
    model = ModelSection(path="models/tiny", make="stand_in_maker:make")
    assert model_source(model, 7) == "models/tiny"
    assert (maker / "models" / "tiny" / "config.json").read_text() == "7"


def test_what_a_killed_maker_left_is_not_taken_for_a_model(maker: Path) -> None:
    (maker / "models" / "tiny.making").mkdir(parents=True)
    (maker / "models" / "tiny.making" / "half").touch()
    model_source(ModelSection(path="models/tiny", make="stand_in_maker:make"), 0)
    assert not (maker / "models" / "tiny" / "half").exists()


def test_services_that_start_at_once_make_it_once(maker: Path) -> None:
    program = (
        "from forebay.config.model_source import model_source; from forebay.config.models import ModelSection; "
        "model_source(ModelSection(path='models/tiny', make='stand_in_maker:make'), 0)"
    )
    started = [subprocess.Popen([sys.executable, "-c", program], cwd=maker) for _ in range(4)]
    assert [process.wait(30) for process in started] == [0] * 4
    assert (maker / "calls").read_text() == "x"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        ("stand_in_maker", "expected module:function"),
        ("no_such_module:make", "no module named no_such_module"),
        ("stand_in_maker:no_such", "stand_in_maker has no no_such"),
        ("stand_in_maker:make_nothing", "no checkpoint there"),
    ],
)
def test_a_maker_that_cannot_be_used(maker: Path, make: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        model_source(ModelSection(path="models/tiny", make=make), 0)
