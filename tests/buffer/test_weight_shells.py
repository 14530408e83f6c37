"""A buffer and a relay as people start them: two commands, and weights arrive behind the second."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.buffer.client import BufferClient
from forebay.cli.main import main
from forebay.config.identity import run_json
from forebay.config.load import load
from forebay.errors import EXIT_DONE, EXIT_USAGE
from tests.buffer.test_weights import install, lineage
from tests.core.run_files import write
from tests.end_to_end.shells import free_ports


@contextmanager
def shell(*words: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A `forebay` command that ends well when told to."""
    process = subprocess.Popen([sys.executable, "-m", "forebay.cli.main", *map(str, words)])
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(30) == EXIT_DONE


async def test_weights_behind_a_relay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ports = [f"127.0.0.1:{port}" for port in free_ports(4)]
    file = write(
        tmp_path, f'[buffer]\nlisten = "{ports[0]}"\nhttp = "{ports[1]}"\n[publish]\nstore = "{tmp_path}/shared"'
    )
    center, edge = tmp_path / "center", tmp_path / "edge"
    site = ("--run.folder", edge, "--buffer.listen", ports[2], "--buffer.http", ports[3], "--upstream", ports[0])
    versions, states = lineage(3, anchors=set())
    with shell("buffer", file, "--run.folder", center), shell("buffer", file, *site):
        async with BufferClient(ports[0]) as learner, BufferClient(ports[2]) as sampler:
            await learner.join("learner", "l", "", "", run_json(load([file], os.environ, [])))
            for encoded in versions:
                await learner.publish(encoded)
            async with asyncio.timeout(60):
                async for announcement in sampler.watch():
                    if announcement.version.step == 3:
                        break
            assert (await install(sampler, None)).digest() == states[3].digest()
            members = (await sampler.status()).members
            assert [entry.state for entry in members if entry.member.id.endswith(ports[2])] == ["live"]
    assert (tmp_path / "shared" / "small" / "manifests" / "1.3.manifest").is_file()
    for where in (center, edge):
        assert main(["weights", "verify", str(where)]) == EXIT_DONE
    assert main(["buffer", str(center), "--verify"]) == EXIT_DONE
    told = capfd.readouterr().out
    assert f"{tmp_path}/shared/small: 4 versions" in told
    assert f"{edge}/buffer/weights: 4 versions" in told


def test_a_relay_of_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", str(write(tmp_path)), "--upstream", "nowhere"]) == EXIT_USAGE
    assert "--upstream: got 'nowhere', expected HOST:PORT" in capsys.readouterr().err
