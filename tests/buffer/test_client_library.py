"""The client as a library: whoever has experience can push it, with nothing but the base install."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from forebay.buffer.client import Lease
from forebay.wire.experience import decode_frame
from tests.buffer.conftest import Serve
from tests.buffer.support import join_learner

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "vllm", "deepspeed", "transformers", "ray", "trl")

#: Makes the imports of a machine that has only the base install.
BLOCKED = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


async def blocked(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the heavy packages are not installed."""
    words = [sys.executable, "-c", BLOCKED + code]
    return await asyncio.to_thread(
        subprocess.run, words, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=60
    )


async def test_the_block_blocks() -> None:
    assert "No module named 'torch'" in (await blocked("import torch")).stderr


async def test_the_client_imports_without_torch_or_vllm() -> None:
    result = await blocked(
        "import forebay.buffer.client, forebay.buffer.in_process, forebay.wire.experience, forebay.wire.weights"
    )
    assert result.returncode == 0, result.stderr


async def test_the_example_pushes_groups_that_a_learner_can_train(serve: Serve) -> None:
    async with serve() as served, served.client() as learner:
        await join_learner(learner, served.run)
        result = await blocked(f"from examples.push_experience import push; push({served.address!r}, 3)")
        assert result.returncode == 0, result.stderr
        lease = await learner.lease(1, 1.0)
        assert isinstance(lease, Lease)
        trajectories = [trajectory for frame in lease.frames for trajectory in decode_frame(frame)]
        assert {(member.group_id, member.member) for member in trajectories} >= {(0, 0), (0, 1), (1, 0), (1, 1)}
        assert all(0 <= member.reward <= 1 for member in trajectories)
        assert all(abs(float(member.logprobs[0]) + 4.6052) < 1e-3 for member in trajectories)
        (pusher,) = [member for member in (await learner.status()).members if member.member.id == "pusher"]
        assert (pusher.groups, pusher.state, pusher.fleet) == (3, "left", "mine")


async def test_the_example_is_short() -> None:
    source = (ROOT / "examples" / "push_experience.py").read_text()
    body = source[source.index("def reply") : source.index("if __name__")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 20


async def test_the_page_about_the_client_runs(serve: Serve) -> None:
    """Every Python block of docs/client.md, one after the other, against a buffer."""
    page = (ROOT / "docs" / "client.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 3
    async with serve() as served, served.client() as learner:
        await join_learner(learner, served.run)
        result = await blocked("\n".join(blocks).replace("buffer.example:7070", served.address))
        assert result.returncode == 0, result.stderr
        assert served.reservoir.state.members[1, "blocking"].groups == 1
        assert served.reservoir.state.members[1, "async"].groups == 2
