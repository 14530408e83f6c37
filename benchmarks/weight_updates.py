"""Real updates: SmolLM2-135M trained by our learner on its example task, one run a learning rate.

The weights are read back from the store of a run, delta by delta, so what is measured is what was published.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples import smollm2
from forebay.wire.host_state import HostState, TensorSpec
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version
from forebay.wire.weights import apply

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


def states(run: Path, steps: Sequence[int]) -> Iterator[tuple[int, HostState]]:
    """(step, the weights after it) for ascending `steps` of a run's first learner. Raises KeyError for a missing one."""
    manifests = {manifest.version.step: manifest for manifest in _manifests(run)}
    state = HostState.allocate(_specs(manifests[0]))
    for step in range(max(steps) + 1):
        apply(state, manifests[step], _payload(run, manifests[step]))
        if step in steps:
            copy = HostState.allocate(state.specs)
            copy.copy_from(state)
            yield step, copy


def _manifests(run: Path) -> list[weights_pb2.Manifest]:
    found = [weights_pb2.Manifest.FromString(path.read_bytes()) for path in run.rglob("*.manifest")]
    return sorted(found, key=lambda manifest: Version.from_proto(manifest.version))


def _payload(run: Path, manifest: weights_pb2.Manifest) -> bytes:
    [chunks] = {path.parent for path in run.rglob("chunks/*")}
    return b"".join((chunks / chunk.digest.hex()).read_bytes() for chunk in manifest.chunks)


def _specs(anchor: weights_pb2.Manifest) -> list[TensorSpec]:
    return [TensorSpec(name=entry.name, dtype=entry.dtype, shape=tuple(entry.shape)) for entry in anchor.tensors]
