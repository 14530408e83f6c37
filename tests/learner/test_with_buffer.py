"""The learner and the real buffer, with a sampler that generates with exactly the published weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from forebay.buffer.client import BlockingClient, BufferClient
from forebay.buffer.reservoir import open_reservoir
from forebay.buffer.server import BufferServer, serving
from forebay.config.identity import run_json
from forebay.config.models import RunFile
from forebay.learner.loop import run_learner
from forebay.learner.snapshot import host_specs, host_tensors
from forebay.learner.stop import Stop
from forebay.wire.experience import encode_frame
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version
from forebay.wire.weights import HostState, apply
from tests.learner.models import VOCAB, tiny_llama

GROUP = 4


class Sampler:
    """A whole sampler in small: follows the weights, generates token by token, appends what it is permitted."""

    def __init__(self, client: BufferClient) -> None:
        self._client = client
        self._model: LlamaForCausalLM = tiny_llama(seed=9)
        self._model.set_attn_implementation("eager")
        self._state = HostState.allocate(host_specs(self._model, torch.float32))
        self._held: Version | None = None

    async def work(self, run: RunFile) -> None:
        await self._client.join("sampler", "s", "fleet", "here", run_json(run))
        await anext(self._client.watch())
        while not await self._round():
            pass

    async def _round(self) -> bool:
        await self._update()
        assert self._held is not None
        answer = await self._client.admit(8, self._held, 0.1)
        for permit in answer.permits:
            trajectories = await asyncio.to_thread(self._generate, permit, self._held)
            await self._client.append(lambda sequence, p=permit, t=trajectories: self._frame(sequence, p, t))
        return answer.finished

    async def _update(self) -> None:
        plan = await self._client.plan(self._held, self._state.digest() if self._held else b"")
        for manifest in plan.path:
            apply(self._state, manifest, await self._client.fetch(manifest))
        if plan.digest and self._held != Version.from_proto(plan.version):
            self._held = Version.from_proto(plan.version)
            assert self._state.digest() == plan.digest
            self._model.load_state_dict(
                {name: tensor.clone() for name, tensor in host_tensors(self._state).items()}, strict=False
            )

    def _generate(self, permit: experience_pb2.Permit, version: Version) -> list[Trajectory]:
        rng = np.random.default_rng(permit.group_id)
        prompt = rng.integers(0, VOCAB, int(rng.integers(2, 8))).astype(np.int32)
        return [self._member(permit.group_id, member, prompt, version) for member in range(GROUP)]

    def _member(self, group_id: int, member: int, prompt: np.ndarray, version: Version) -> Trajectory:
        random = torch.Generator().manual_seed(group_id * GROUP + member)
        tokens, logprobs = prompt.tolist(), []
        for _ in range(3 + member):
            with torch.no_grad():
                logits = self._model(torch.tensor([tokens])).logits[0, -1]
            token = int(torch.multinomial(torch.softmax(logits, -1), 1, generator=random))
            tokens.append(token)
            logprobs.append(float(torch.log_softmax(logits, -1)[token]))
        generated = np.asarray(tokens[len(prompt) :], np.int32)
        return Trajectory(
            group_id=group_id,
            member=member,
            prompt_tokens=prompt,
            tokens=generated,
            loss_mask=np.ones(len(generated), np.bool_),
            logprobs=np.asarray(logprobs, np.float32),
            spans=(VersionSpan(start=0, version=version),),
            temperature=1.0,
            top_p=1.0,
            reward=float(np.mean(generated % 2)),
        )

    def _frame(
        self, sequence: int, permit: experience_pb2.Permit, trajectories: list[Trajectory]
    ) -> experience_pb2.Frame:
        member = self._client.member
        return encode_frame(
            trajectories, run="test", sampler=member.id, fleet="fleet", region="here", incarnation=member.incarnation,
            sequence=sequence, attempts={permit.group_id: permit.attempt},
        )  # fmt: skip


def run_file(home: Path, model: Path, **learner: object) -> RunFile:
    return RunFile.model_validate(
        {
            "run": {"name": "test", "folder": home},
            "model": {"path": str(model)},
            "task": {"name": "none", "heldout_prompts": 0},
            "learner": {
                "steps": 5, "groups_per_step": 3, "group_size": GROUP, "max_staleness": 0, "lr": 1e-2,
                "compute_dtype": "float32", "zero_stage": 0, "checkpoint_every_steps": 2, **learner,
            },
            "publish": {"every_steps": 1, "dtype": "float32"},
        }
    )  # fmt: skip


class StoppingClient(BlockingClient):
    """Asks the learner to stop once a step is committed."""

    def __init__(self, address: str, stop: Stop, step: int | None) -> None:
        super().__init__(address)
        self._stop, self._step = stop, step

    def commit(self, step: int, checkpoint_step: int, metrics: Mapping[str, Any], attempt: int = 0) -> None:
        super().commit(step, checkpoint_step, metrics, attempt)
        if step == self._step:
            self._stop.ask("test")


async def learn(run: RunFile, server: BufferServer, stop_after: int | None) -> int:
    def work() -> int:
        stop = Stop()
        with StoppingClient(f"127.0.0.1:{server.port}", stop, stop_after) as client:
            return run_learner(run, client, stop)

    return await asyncio.to_thread(work)


@pytest.mark.parametrize("stops_after", [None, 3])
async def test_staleness_0_is_the_synchronous_algorithm(tmp_path: Path, stops_after: int | None) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    run = run_file(tmp_path / "run", tmp_path / "model")
    async with serving(open_reservoir(run), listen="127.0.0.1:0") as server:
        client = BufferClient(f"127.0.0.1:{server.port}")
        sampling = asyncio.create_task(Sampler(client).work(run))
        if stops_after is not None:
            assert await learn(run, server, stops_after) == 0
            assert server.reservoirs[0].state.committed == stops_after
        assert await learn(run, server, None) == 0
        await asyncio.wait_for(sampling, 30)
        ledger = await client.ledger()
        await client.close()
    lines = [json.loads(line) for line in (run.run.home / "learner" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert {line["staleness_max"] for line in lines} == {0}
    assert max(line["ratio_minus_1"] for line in lines) < 2e-5
    trained = sum(row.groups for row in ledger.rows if row.state == "trained")
    assert trained == 15
