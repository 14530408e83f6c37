"""Stand-ins for sampler and learner that speak the real protocol but compute nothing, to be run as processes.

`python -m tests.fleet.standins ROLE run.toml …`. A file `crash-ROLE-N` beside the run file makes the role kill itself,
once, when it reaches step N; `refuse-ROLE` makes it end with a usage error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forebay.buffer.client import BlockingClient, Lease
from forebay.cli.arguments import load_run
from forebay.cli.main import parse
from forebay.config.identity import run_json
from forebay.config.models import RunFile
from forebay.wire.experience import encode_frame
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.v1 import control_pb2, experience_pb2
from forebay.wire.version import Version
from forebay.wire.weights import Encoded, HostState, TensorSpec, encode_anchor

LONG_POLL_S = 0.5


def main(role: str, words: list[str]) -> int:
    """Serve as `role` until done or asked to end; returns the exit code."""
    arguments = parse([role, *words])
    folder = arguments.run_files[0].parent
    if (folder / f"refuse-{role}").exists():
        print(f"forebay: the stand-in {role} refuses", file=sys.stderr)
        return 2
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    run = load_run(arguments)
    return (learn if role == "learner" else sample)(run, folder, stop)


def crash_at(folder: Path, role: str, step: int) -> None:
    """Die without a word at `step` or later, if the test wants it and no other of this role did."""
    for order in folder.glob(f"crash-{role}-*"):
        if int(order.name.rpartition("-")[2]) <= step:
            with contextlib.suppress(FileNotFoundError):
                order.unlink()
                print(f"the stand-in {role} is about to die", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)


def learn(run: RunFile, folder: Path, stop: threading.Event) -> int:
    """Lease, commit, publish; each step is a checkpoint."""
    with BlockingClient(run.learner_target) as buffer:
        joined = buffer.join("learner", "learner", "", "", run_json(run))
        buffer.rewind(joined.checkpoint_step)
        step, incarnation = joined.checkpoint_step, joined.member.incarnation
        buffer.publish(weights(Version(incarnation, step)))
        while step < run.learner.steps and not stop.is_set():
            if buffer.heartbeat("waiting: groups", 0.0, Version(incarnation, step), b"", {}).drain:
                break
            leased = buffer.lease(step + 1, LONG_POLL_S)
            if isinstance(leased, Lease):
                step = leased.step
                crash_at(folder, "learner", step)
                checkpoint(run, step)
                buffer.commit(step, step, metrics(step))
                buffer.publish(weights(Version(incarnation, step)))
        buffer.leave("done" if step == run.learner.steps else "drained")
    return 0


def checkpoint(run: RunFile, step: int) -> None:
    """The folder that the summary looks for."""
    folder = run.run.home / "learner" / "checkpoints" / f"step_{step:06}"
    (folder / "trainer").mkdir(parents=True, exist_ok=True)
    (folder / "trainer" / "state.json").touch()


def metrics(step: int) -> dict[str, object]:
    """Metrics of a step that took a second."""
    seconds = {"wait_buffer": 0.25, "forward": 0.75}
    return {"reward_mean": step / 10, "kl": 0.0, "generated_tokens": 20, "tokens_per_s": 20.0, "seconds": seconds}


def sample(run: RunFile, folder: Path, stop: threading.Event) -> int:
    """Admit, append; score what the buffer orders."""
    with BlockingClient(run.sampler_target) as buffer:
        sampler = run.sampler
        buffer.join("sampler", sampler.id or "stand-in", sampler.fleet, sampler.region, run_json(run))
        while not stop.is_set():
            held = held_version(buffer)
            beat = buffer.heartbeat("generating", 0.0, held, b"", {"tokens_per_s": 100.0, "wait_share": 0.5})
            if beat.finished or beat.drain:
                break
            answer = buffer.admit(1, held, LONG_POLL_S)
            if answer.HasField("eval") and held is not None:
                buffer.report_eval(scored(held, run))
            if answer.permits and held is not None:
                append(buffer, run, answer.permits, held)
            crash_at(folder, "sampler", held.step if held else -1)
        buffer.leave("drained" if stop.is_set() else "finished")
    return 0


def held_version(buffer: BlockingClient) -> Version | None:
    """The newest version, as if it had been fetched."""
    status = buffer.status()
    return Version.from_proto(status.newest) if status.HasField("newest") else None


def append(buffer: BlockingClient, run: RunFile, permits: Sequence[experience_pb2.Permit], held: Version) -> None:
    """Groups, as if they had been generated."""
    trajectories = [
        trajectory(permit.group_id, index, held) for permit in permits for index in range(run.learner.group_size)
    ]
    buffer.append(
        lambda sequence: encode_frame(
            trajectories,
            run=run.run.name,
            sampler=buffer.member.id,
            fleet=run.sampler.fleet,
            region=run.sampler.region,
            incarnation=buffer.member.incarnation,
            sequence=sequence,
            attempts={permit.group_id: permit.attempt for permit in permits},
        )
    )


def trajectory(group_id: int, index: int, held: Version) -> Trajectory:
    """Five tokens."""
    return Trajectory(
        group_id=group_id,
        member=index,
        prompt_tokens=np.arange(3, dtype=np.int32),
        tokens=np.full(5, 7, np.int32),
        loss_mask=np.ones(5, np.bool_),
        logprobs=np.full(5, -0.5, np.float32),
        spans=(VersionSpan(start=0, version=held),),
        temperature=1.0,
        top_p=1.0,
        reward=1.0,
    )


def weights(version: Version) -> Encoded:
    """An anchor of one small tensor."""
    state = HostState.allocate([TensorSpec(name="w", dtype="BF16", shape=(4000,))])
    state.bits_of("w")[:] = np.arange(4000, dtype=np.uint16) + version.step
    return encode_anchor(state, version=version)


def scored(version: Version, run: RunFile) -> control_pb2.EvalResult:
    """A score that grows with the steps."""
    score = 0.2 + 0.7 * version.step / run.learner.steps
    prompts = run.task.heldout_prompts
    return control_pb2.EvalResult(version=version.to_proto(), score=score, stderr=0.02, prompts=prompts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
