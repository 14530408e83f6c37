"""Where settings come from: run files, `FOREBAY_SECTION__KEY` in the environment, dotted flags."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config.keys import KeyTree
from forebay.errors import UsageError

ENVIRONMENT_PREFIX = "FOREBAY_"
LEVEL_SEPARATOR = "__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value, the key it is for, and what to call its source in an error: a file, a variable or a flag."""

    path: tuple[str, ...]
    value: Any
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A dotted flag as it was typed: `learner.lr`, `1e-6`, `--learner.lr`."""

    key: str
    text: str
    origin: str

    @property
    def arguments(self) -> list[str]:
        """The flag for another command line, in a form that no value can break."""
        return [f"--{self.key}={self.text}"]


def from_file(path: Path) -> list[Setting]:
    """Every setting of a run file. Raises UsageError when it is missing, unreadable or no TOML (with the line)."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {_lower_first(str(error))}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text file: byte {error.start} is not UTF-8") from error
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such run file{_neighbours(path)}") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot read the run file: {error.strerror}") from error
    return [Setting(path=key, value=value, origin=str(path)) for key, value in _leaves(tree, ())]


def from_environment(environ: Mapping[str, str], keys: KeyTree) -> list[Setting]:
    """`FOREBAY_LEARNER__LR=1e-6` sets `learner.lr`; variables without a double underscore are not settings."""
    settings = []
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        path = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split(LEVEL_SEPARATOR))
        if len(path) > 1:
            settings.append(Setting(path=path, value=parse_value(environ[name], path, keys), origin=name))
        else:
            _refuse_single_underscore(name, keys)
    return settings


def from_flags(flags: Sequence[Flag], keys: KeyTree) -> list[Setting]:
    """Dotted flags, later ones win."""
    paths = [tuple(flag.key.split(".")) for flag in flags]
    return [
        Setting(path=path, value=parse_value(flag.text, path, keys), origin=flag.origin)
        for flag, path in zip(flags, paths, strict=True)
    ]


def parse_value(text: str, path: tuple[str, ...], keys: KeyTree) -> Any:
    """Read `text` as a TOML value; a plain word, or anything for a key that holds text, is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed.get("value")
    injected = len(parsed) != 1  # the text held a line break and a second key
    if injected or isinstance(value, datetime.date | datetime.time):
        return text
    return text if keys.holds_text(path) and not isinstance(value, str) else value


def merge(settings: Sequence[Setting]) -> dict[str, Any]:
    """One nested table; of two settings of one key the later wins, tables are merged key by key."""
    tree: dict[str, Any] = {}
    for setting in settings:
        node = tree
        for part in setting.path[:-1]:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        last = setting.path[-1]
        if setting.value == {} and isinstance(node.get(last), dict):
            continue
        node[last] = setting.value
    return tree


def _leaves(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in node.items():
        here = (*path, key)
        if isinstance(value, dict) and value:
            yield from _leaves(value, here)
        else:
            yield here, value


def _refuse_single_underscore(name: str, keys: KeyTree) -> None:
    """`FOREBAY_LEARNER_LR` would be ignored without a word, and its author would never know."""
    section, _, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("_")
    if key in keys.of((section,)):
        right = f"{ENVIRONMENT_PREFIX}{section}{LEVEL_SEPARATOR}{key}".upper()
        raise UsageError(f"{name}: not a setting; sections and keys are parted by two underscores: {right}")


def _neighbours(path: Path) -> str:
    found = sorted(path.parent.glob("*.toml"))[:4] if path.parent.is_dir() else []
    return f"; there {'is' if len(found) == 1 else 'are'} {', '.join(map(str, found))}" if found else ""


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
