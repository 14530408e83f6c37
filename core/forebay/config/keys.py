"""The keys a run file may have and what each expects, read from the models' JSON schema."""

from __future__ import annotations

import difflib
from functools import cache
from typing import Any

from forebay.config.models import RunFile
from forebay.config.section import Address
from forebay.config.toml_text import toml_value

Path = tuple[str, ...]


class KeyTree:
    """Answers about keys by path, `("learner", "lr")`."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema

    def of(self, path: Path) -> list[str]:
        """The valid keys below `path`; empty where any key goes, or where there are none."""
        return list(self._node(path).get("properties", {}))

    def holds_text(self, path: Path) -> bool:
        """Whether the key takes text and nothing else."""
        kinds = {option.get("type") for option in self._options(path)} - {"null"}
        return kinds == {"string"}

    def expected(self, path: Path) -> str:
        """What the key wants, in words: `a whole number above 0`."""
        wanted = [_in_words(option) for option in self._options(path) if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(wanted)) or "another value"

    def suggestion(self, path: Path) -> str:
        """For an unknown key: the one that was probably meant, else what there is."""
        section, key = path[:-1], path[-1]
        close = difflib.get_close_matches(key, self.of(section), n=1, cutoff=0.6)
        elsewhere = [f"{name}.{key}" for name in self.of(()) if key in self.of((name,))]
        if close:
            return f"did you mean {'.'.join((*section, close[0]))}?"
        if elsewhere:
            return f"did you mean {elsewhere[0]}?"
        return f"expected one of {', '.join(self.of(section))}"

    def _options(self, path: Path) -> list[dict[str, Any]]:
        node = self._node(path)
        return [self._followed(option) for option in node.get("anyOf", [node])]

    def _node(self, path: Path) -> dict[str, Any]:
        node = self._schema
        for part in path:
            node = self._followed(node.get("properties", {}).get(part, {}))
        return node

    def _followed(self, node: dict[str, Any]) -> dict[str, Any]:
        reference = node.get("$ref")
        if reference is None:
            return node
        return dict(self._schema["$defs"][reference.rsplit("/", 1)[-1]])


@cache
def run_file_keys() -> KeyTree:
    """The keys of today's run file."""
    return KeyTree(RunFile.model_json_schema())


def _in_words(option: dict[str, Any]) -> str:
    if "enum" in option:
        return "one of " + ", ".join(toml_value(value) for value in option["enum"])
    match option.get("type"):
        case "integer":
            return "a whole number" + _range(option)
        case "number":
            return "a number" + _range(option)
        case "boolean":
            return "true or false"
        case "array":
            return f"a list of {option['minItems']} numbers" if "prefixItems" in option else "a list"
        case "object":
            return "a table"
        case _:
            return _text_in_words(option)


def _text_in_words(option: dict[str, Any]) -> str:
    pattern = option.get("pattern")
    if pattern is None:
        return "text"
    return "HOST:PORT" if pattern == _address_pattern() else f"text like {pattern}"


def _range(option: dict[str, Any]) -> str:
    bounds = (
        ("exclusiveMinimum", "above"),
        ("minimum", "of at least"),
        ("exclusiveMaximum", "below"),
        ("maximum", "of at most"),
    )
    found = [f" {word} {option[key]:g}" for key, word in bounds if key in option]
    return " and".join(found)


@cache
def _address_pattern() -> str:
    field = Address.__metadata__[0]  # type: ignore[attr-defined]
    return str(next(part.pattern for part in field.metadata if hasattr(part, "pattern")))
