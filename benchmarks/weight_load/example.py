"""The example runs whose weights move: what their run files say, and updates as an optimizer would leave them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.buffer_load.server import RunSections
from examples import smollm2
from forebay.wire.host_state import HostState
from forebay.wire.version import Version
from forebay.wire.weights import Encoded, encode_anchor, encode_delta

ROOT = Path(__file__).parents[2]
CHANGED = 0.01  #: of all elements in an update


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A run file in `examples/`. `step_s`: seconds of one of its steps on 2 cores (docs/results/first-run.md)."""

    file: str
    step_s: float

    def sections(self) -> RunSections:
        """The run file, its model made or fetched where that is needed."""
        sections: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "examples" / self.file).read_text(encoding="utf-8"))
        model = ROOT / sections["model"]["path"]
        if self is SMOLLM2 and not (model / "config.json").is_file():
            smollm2.bring(model)
        return sections | {"buffer": {"member_timeout_s": 3600.0}}


TINY = Example(file="quickstart.toml", step_s=1.3)
SMOLLM2 = Example(file="smollm2.toml", step_s=10.6)


def updates(state: HostState, incarnation: int) -> Iterator[Encoded]:
    """An anchor of `state` as step 0, then deltas that move other elements of every tensor by one ULP each."""
    yield encode_anchor(state, version=Version(incarnation, 0))
    random, step = np.random.default_rng(0), 0
    while True:
        moved, step = HostState.allocate(state.specs), step + 1
        moved.copy_from(state)
        for name in moved.names:
            bits = moved.open_for_update(name)
            bits[random.random(len(bits), np.float32) < CHANGED] += 1
        base = Version(incarnation, step - 1)
        yield encode_delta(state, moved, version=Version(incarnation, step), base_version=base)
        state = moved
