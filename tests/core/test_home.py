"""The run folder is marked, and only what is marked is ever removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.config.claim import claimed
from forebay.config.home import MARKER, clear_home, prepare_home
from forebay.errors import UsageError
from tests.core.run_files import loaded


def test_a_new_folder_is_made_and_marked(tmp_path: Path) -> None:
    run = loaded(tmp_path, run__folder=str(tmp_path / "a" / "b"))
    assert (prepare_home(run) / MARKER).is_file()
    assert prepare_home(run) == tmp_path / "a" / "b"


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"holds other files \(thesis\.tex\)"):
        prepare_home(loaded(tmp_path, run__folder=str(tmp_path / "home")))


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    with pytest.raises(UsageError, match=r"run folder .*home: file exists; set run\.folder to a folder"):
        prepare_home(loaded(tmp_path, run__folder=str(tmp_path / "home")))


def test_a_folder_that_cannot_be_made_even_by_root(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"set run\.folder to a folder you can write to"):
        prepare_home(loaded(tmp_path, run__folder="/proc/forebay"))


def test_fresh_removes_everything_but_the_marker(tmp_path: Path) -> None:
    run = loaded(tmp_path, run__folder=str(tmp_path / "home"))
    home = prepare_home(run)
    (home / "buffer" / "journal").mkdir(parents=True)
    (home / "outside").symlink_to(tmp_path)
    clear_home(run)
    assert [entry.name for entry in home.iterdir()] == [MARKER]
    assert (tmp_path / "run.toml").exists()


def test_fresh_does_not_touch_an_unmarked_folder(tmp_path: Path) -> None:
    (tmp_path / "home" / "buffer").mkdir(parents=True)
    with pytest.raises(UsageError, match="not made by forebay"):
        clear_home(loaded(tmp_path, run__folder=str(tmp_path / "home")))
    assert (tmp_path / "home" / "buffer").exists()


def test_one_supervisor_a_folder(tmp_path: Path) -> None:
    home = prepare_home(loaded(tmp_path, run__folder=str(tmp_path / "home")))
    with claimed(home), pytest.raises(UsageError, match=r"forebay run \(pid \d+\) works there"), claimed(home):
        pass
    with claimed(home):
        pass
