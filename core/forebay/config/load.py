"""Read a run: file(s) < environment < flags, and every mistake told in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forebay.config.keys import KeyTree, run_file_keys
from forebay.config.models import RunFile
from forebay.config.sources import Flag, Setting, from_environment, from_file, from_flags, merge
from forebay.config.toml_text import toml_value
from forebay.errors import UsageError


def load(files: Sequence[Path], environ: Mapping[str, str], flags: Sequence[Flag] = ()) -> RunFile:
    """The resolved run file. Raises UsageError: one line with source, key, what was got and what is expected."""
    keys = run_file_keys()
    settings = [setting for file in files for setting in from_file(file)]
    settings += from_environment(environ, keys)
    settings += from_flags(flags, keys)
    tree = merge(settings)
    try:
        return RunFile.model_validate(tree)
    except ValidationError as error:
        raise UsageError(_one_line(error, _Sources(tree, settings, files), keys)) from error


@dataclass(frozen=True, slots=True)
class _Sources:
    """What was given, and by whom."""

    tree: dict[str, Any]
    settings: Sequence[Setting]
    files: Sequence[Path]

    @property
    def named(self) -> str:
        return " and ".join(map(str, self.files)) or "no run file"

    def origin(self, path: tuple[str, ...]) -> str:
        """Who set the key, or something below it, last."""
        matching = [setting.origin for setting in self.settings if setting.path[: len(path)] == path]
        return matching[-1] if matching else self.named

    def value(self, path: tuple[str, ...]) -> Any:
        node: Any = self.tree
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        return node


def _one_line(error: ValidationError, sources: _Sources, keys: KeyTree) -> str:
    """The most telling of the mistakes: a misspelt key first, because it often makes another one 'missing'."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return _told(problems[0], sources, keys) + more


def _told(problem: Any, sources: _Sources, keys: KeyTree) -> str:
    path = _key_path(problem["loc"], keys)
    key, given = ".".join(path), sources.value(path)
    if not path:
        return f"{sources.named}: {problem['ctx']['error']}"
    if problem["type"] == "extra_forbidden":
        return f"{sources.origin(path)}: unknown {_kind(path)}; {keys.suggestion(path)}"
    if given is None:
        return f"{sources.named}: {_kind(path)} is missing; expected {_wanted(path, keys)}"
    return f"{sources.origin(path)}: {key} is {toml_value(given)}; expected {_wanted(path, keys)}"


def _kind(path: tuple[str, ...]) -> str:
    return f"section [{path[0]}]" if len(path) == 1 else f"key {'.'.join(path)}"


def _wanted(path: tuple[str, ...], keys: KeyTree) -> str:
    inner = keys.of(path)
    return f"a section with {', '.join(inner[:4])}{', …' if len(inner) > 4 else ''}" if inner else keys.expected(path)


def _key_path(loc: tuple[int | str, ...], keys: KeyTree) -> tuple[str, ...]:
    """The run file's part of pydantic's location, which goes on into list items and union branches."""
    path: tuple[str, ...] = ()
    for part in loc:
        if path and not keys.of(path):
            break
        path = (*path, str(part))
    return path
