"""Write TOML: what `config show` prints and what is stored with a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(tree: Mapping[str, Any]) -> str:
    """A whole document. None is left out: TOML has no word for it."""
    return "\n".join(_tables(tree, ())).strip() + "\n"


def toml_value(value: Any) -> str:
    """One value, tables inline. Raises TypeError on what TOML cannot hold."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str() | PurePath():
            # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            inner = (f"{_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None)
            return f"{{{', '.join(inner)}}}"
        case list() | tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case None:
            return "nothing"
        case _:
            raise TypeError(f"TOML cannot hold a {type(value).__name__}")


def _tables(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    values = {key: value for key, value in tree.items() if value is not None and not isinstance(value, Mapping)}
    tables = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    if path and (values or not tables):
        yield f"\n[{'.'.join(_key(part) for part in path)}]"
    yield from (f"{_key(key)} = {toml_value(value)}" for key, value in values.items())
    for key, table in tables.items():
        yield from _tables(table, (*path, key))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)
