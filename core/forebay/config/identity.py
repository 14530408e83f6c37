"""What makes a run this run: the part of the run file that all its services must share."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import Any

from forebay.config.models import LOCAL_KEYS, RunFile


def run_json(run: RunFile) -> str:
    """The run-defining part as canonical JSON, the same on every service of the run."""
    return json.dumps(_without_local(run.model_dump(mode="json"), ""), sort_keys=True, separators=(",", ":"))


def run_name(run_defining: str) -> str:
    """The run's name in a run-defining part; "" when it has none."""
    run = json.loads(run_defining or "{}").get("run", {})
    return str(run.get("name", ""))


def differences(stored: str, given: str) -> list[str]:
    """One line a key on which two run-defining parts disagree: `learner.lr: 1e-06 in the run, 2e-06 here`."""
    ours, theirs = _flat(json.loads(stored), ""), _flat(json.loads(given), "")
    return [
        f"{key}: {_shown(ours, key)} in the run, {_shown(theirs, key)} here"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key, _ABSENT) != theirs.get(key, _ABSENT)
    ]


_ABSENT = object()


def _shown(flat: dict[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "not set"


def _without_local(node: Any, path: str) -> Any:
    if not isinstance(node, dict):
        return node
    children = ((key, f"{path}.{key}" if path else key, value) for key, value in node.items())
    return {key: _without_local(value, name) for key, name, value in children if not _is_local(name)}


def _is_local(name: str) -> bool:
    """In LOCAL_KEYS, `*` stands for a name that the user chose."""
    return any(fnmatchcase(name, pattern) for pattern in LOCAL_KEYS)


def _flat(node: Any, path: str) -> dict[str, Any]:
    if not isinstance(node, dict) or not node:
        return {path: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat.update(_flat(value, f"{path}.{key}" if path else key))
    return flat
