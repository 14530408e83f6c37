"""Real updates: SmolLM2-135M trained by our learner on its example task, one run a learning rate.

The weights are read back from the store of a run, delta by delta, so what is measured is what was published.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from examples import smollm2
from forebay.buffer.weight_key import read_manifests
from forebay.buffer.weight_place import LocalPlace
from forebay.buffer.weight_replay import Replay
from forebay.wire.float_cast import cast
from forebay.wire.host_state import HostState, TensorSpec
from forebay.wire.version import Version

ROOT = Path(__file__).parents[1]
RUN_FILE = ROOT / "examples" / "smollm2.toml"
FIRST = 6  #: the step that updates are measured from: Adam's moments are no longer new
STEPS = FIRST + 10


def make_run(folder: Path, lr: float, steps: int = STEPS) -> None:
    """Train `steps` steps at this rate, every version published; about 5 minutes on 2 cores. Nothing to do when it is
    there. Raises CalledProcessError."""
    if any(folder.rglob("*.manifest")):
        return
    if not (ROOT / smollm2.FOLDER / "config.json").is_file():
        smollm2.bring(ROOT / smollm2.FOLDER)
    settings = {"run.folder": folder, "learner.lr": lr, "learner.steps": steps, "publish.anchor_every": 10 * steps}
    flags = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    forebay = Path(sys.executable).with_name("forebay")
    subprocess.run([forebay, "run", RUN_FILE, *flags, "--task.heldout_prompts", "16"], check=True, stdout=sys.stderr)


def synthetic(elements: int = 1 << 24, moved: float = 5e-7) -> tuple[HostState, HostState]:
    """Masters N(0, 0.02) that move by N(0, `moved`), before and after, in bfloat16."""
    random = np.random.default_rng(0)
    masters = random.standard_normal(elements, np.float32) * np.float32(0.02)
    fresh = masters + random.standard_normal(elements, np.float32) * np.float32(moved)
    found = []
    for values in (masters, fresh):
        state = HostState.allocate([TensorSpec(name="w", dtype="BF16", shape=(elements,))])
        state.open_for_update("w")[:] = cast(values.view(np.uint32), "F32", "BF16")
        found.append(state)
    return found[0], found[1]


def states(run: Path, steps: Sequence[int]) -> Iterator[tuple[int, HostState]]:
    """(step, the weights after it) for ascending `steps` of a run's first learner. Raises UsageError."""
    [folder] = (path.parent for path in run.rglob("manifests"))
    place = LocalPlace(folder)
    manifests = read_manifests(place)
    replay, incarnation = Replay(place, manifests), min(key.version.incarnation for key in manifests)
    for step in steps:
        led = replay.weights_of(Version(incarnation, step))
        copy = HostState.allocate(led.specs)
        copy.copy_from(led)
        yield step, copy
