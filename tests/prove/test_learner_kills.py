"""PPO with critic and reference in real processes, killed with -9 again and again, and then trained once more from the
journal: every version has the same weights, bit for bit.

Minutes long, so not part of `make test`: `make prove`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.buffer.client import BufferClient
from forebay.config.load import load
from tests.end_to_end.shells import ROOT, Shells, Watch
from tests.learner.models import tiny_llama
from tests.learner.run_texts import run_text
from tests.learner.test_with_buffer import Sampler

DEADLINE_S = 300.0
KILLED_FROM = (3, 8, 13)  # two of them before a first or next checkpoint
LEARNER = """
preset = "ppo"
steps = 18
groups_per_step = 4
group_size = 4
max_staleness = 2
lr = 1e-3
kl_coef = 0.05
kl_in = "reward"
checkpoint_every_steps = 5
[learner.critic]
lr = 1e-3
"""

pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]


async def test_a_learner_that_is_killed_trains_what_an_uninterrupted_one_would_have(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    run_file = tmp_path / "run.toml"
    run_file.write_text(run_text(tmp_path / "model", LEARNER))
    watch = Watch()
    with Shells(tmp_path, run_file, []) as shells:
        shells.start("buffer", "buffer")
        await shells.until(lambda status: True, watch, DEADLINE_S)
        async with BufferClient(shells.address) as client, asyncio.TaskGroup() as group:
            group.create_task(Sampler(client).work(load([run_file], {})))
            for number, step in enumerate(KILLED_FROM):
                shells.start(f"learner{number}", "learner")
                await shells.until(lambda status, step=step: status.step >= step, watch, DEADLINE_S)
                shells.kill(f"learner{number}")
            shells.start("learner", "learner")
            await shells.until(lambda status: status.state == "finished", watch, DEADLINE_S)
        # The learners that were killed had steps to train again, or this would prove nothing.
        assert any(later < earlier for earlier, later in zip(watch.steps, watch.steps[1:], strict=False))
        replayed = await asyncio.to_thread(replay, run_file, shells.home)
    print(replayed.stdout)
    assert replayed.returncode == 0, replayed.stderr
    assert "versions are the same, bit for bit" in replayed.stdout


def replay(run_file: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """`forebay replay --train`."""
    words = [sys.executable, "-m", "forebay.cli.main", "replay", str(run_file), f"--run.folder={home}", "--train"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
