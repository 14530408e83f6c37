"""What was changed when a run was resumed: coefficients of the learner, from a step on.

Kept beside the learner's checkpoints, `RUN_FOLDER/learner/steering.jsonl`, one change a line:

    {"after": 10, "settings": {"learner.kl_coef": 0.1}}

so that steps up to 10 are trained again as they were, and later ones as somebody wanted them since.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.config.learner_section import STEERABLE, LearnerSection
from forebay.config.models import RunFile
from forebay.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Settings by dotted key, for all steps after `after`."""

    after: int
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """All changes of a run, in the order of their steps."""

    changes: tuple[Change, ...] = field(default=())

    @classmethod
    def read(cls, home: Path) -> Steering:
        """What the run folder says; nothing where nobody changed anything. Raises UsageError."""
        path = _path(home)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            return cls(changes=tuple(_checked(json.loads(line)) for line in lines))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{path}: not what `forebay resume --set` writes ({error}); mend or remove it") from error

    def write(self, home: Path) -> None:
        """Whole or not at all."""
        path = _path(home)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        lines = [json.dumps({"after": change.after, "settings": dict(change.settings)}) for change in self.changes]
        partial.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        partial.replace(path)

    def changed(self, after: int, settings: Mapping[str, Any]) -> Steering:
        """With one more change. What was changed after a later step goes: those steps are void."""
        kept = [change for change in self.changes if change.after < after]
        same = {
            key: value for change in self.changes if change.after == after for key, value in change.settings.items()
        }
        merged = {**same, **settings}
        return Steering(changes=(*kept, *([Change(after=after, settings=merged)] if merged else [])))

    def at(self, run: RunFile, step: int) -> RunFile:
        """The run file that `step` is trained with."""
        return _with(run, [change for change in self.changes if change.after < step])

    def told(self, step: int) -> str:
        """What differs from the run file at `step`, in words."""
        settings = {
            key: value for change in self.changes if change.after < step for key, value in change.settings.items()
        }
        return ", ".join(f"{key} = {value}" for key, value in settings.items())

    def widest(self, run: RunFile) -> RunFile:
        """A run file whose learner has every part that some step needs: a reference model, gradients of entropy."""
        learners = [self.at(run, change.after + 1).learner for change in self.changes]
        most = {key: max(getattr(one, key) for one in (run.learner, *learners)) for key in ("kl_coef", "entropy_coef")}
        return run.model_copy(update={"learner": run.learner.model_copy(update=most)})


def _path(home: Path) -> Path:
    return home / "learner" / "steering.jsonl"


def _checked(line: Mapping[str, Any]) -> Change:
    unknown = line["settings"].keys() - STEERABLE
    if unknown:
        raise ValueError(f"{min(unknown)} cannot be changed while a run goes on")
    return Change(after=int(line["after"]), settings=dict(line["settings"]))


def _with(run: RunFile, changes: list[Change]) -> RunFile:
    if not changes:
        return run
    tree = run.learner.model_dump()
    for change in changes:
        for key, value in change.settings.items():
            _, *path, last = key.split(".")
            node = tree
            for part in path:
                node = node[part]
            node[last] = value
    return run.model_copy(update={"learner": LearnerSection.model_validate(tree)})
