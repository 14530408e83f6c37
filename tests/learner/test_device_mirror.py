"""Filling host states with what has changed on the device: the same bits as a copy of everything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from forebay.config.models import RunFile
from forebay.learner.device_mirror import DeviceMirror
from forebay.learner.loop import run_learner
from forebay.learner.snapshot import copy_to_host, host_specs
from forebay.learner.stop import Stop
from forebay.wire.weights import HostState
from tests.learner.fake_buffer import FakeBuffer
from tests.learner.models import tiny_llama
from tests.learner.test_engine import EVERYWHERE
from tests.learner.test_loop import batch_of, run_file

ROOMS = 3


def scramble(model: PreTrainedModel, seed: int, share: float) -> None:
    """New bit patterns, any of them, at about `share` of the places of every second parameter."""
    random = torch.Generator().manual_seed(seed)
    for parameter in list(model.parameters())[seed % 2 :: 2]:
        bits = parameter.data.view(torch.int32)
        chosen = torch.rand(bits.shape, generator=random) < share
        bits[chosen] = torch.randint(-(1 << 31), 1 << 31, bits.shape, generator=random).to(torch.int32)[chosen]


def copied(model: PreTrainedModel, dtype: torch.dtype) -> bytes:
    state = HostState.allocate(host_specs(model, dtype))
    copy_to_host(model, state)
    return state.digest()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, ROOMS - 1), st.sampled_from([0.0, 0.001, 0.2, 1.0])), min_size=1, max_size=12),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_whatever_state_is_filled_has_the_models_bits(steps: list[tuple[int, float]], dtype: torch.dtype) -> None:
    model = tiny_llama(hidden=16)
    mirror, rooms = DeviceMirror(model), [HostState.allocate(host_specs(model, dtype)) for _ in range(ROOMS)]
    for seed, (room, share) in enumerate(steps):
        scramble(model, seed, share)
        mirror.fill(rooms[room])
        assert rooms[room].digest() == copied(model, dtype)


def test_only_what_has_changed_is_moved() -> None:
    model = tiny_llama()
    mirror, room = DeviceMirror(model), HostState.allocate(host_specs(model, torch.bfloat16))
    mirror.fill(room)
    before, moved = room.tensor_digests(), mirror.moved_bytes
    assert moved == room.model_bytes
    weight = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    with torch.no_grad():
        weight[3, :10] += 1
    mirror.fill(room)
    assert mirror.moved_bytes - moved == 10 * (4 + 2)
    changed = {name for name, digest in room.tensor_digests().items() if digest != before[name]}
    assert changed == {"model.layers.1.mlp.up_proj.weight"}
    with torch.no_grad():
        weight += 1
    mirror.fill(room)
    assert mirror.moved_bytes - moved == 10 * (4 + 2) + 2 * weight.numel(), "without positions where all has changed"
    assert room.digest() == copied(model, torch.bfloat16)


def test_a_state_that_lags_far_costs_a_copy_and_no_memory() -> None:
    model = tiny_llama(hidden=16)
    mirror, late, busy = DeviceMirror(model), *(HostState.allocate(host_specs(model, torch.bfloat16)) for _ in "ab")
    for room in (late, busy):
        mirror.fill(room)
    for seed in range(40):
        scramble(model, seed, 0.05)
        mirror.fill(busy)
        assert sum(change.nbytes for kept in mirror._changes for change in kept.values()) <= busy.model_bytes
    moved = mirror.moved_bytes
    mirror.fill(late)
    assert mirror.moved_bytes - moved == late.model_bytes
    assert late.digest() == busy.digest() == copied(model, torch.bfloat16)


def with_difference(run: RunFile, where: str) -> RunFile:
    return run.model_copy(update={"publish": run.publish.model_copy(update={"difference": where})})


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_publishes_the_same_versions(tmp_path: Path, model_folder: Path, stage: int) -> None:
    published = []
    for where in ("host", "device"):
        buffer = FakeBuffer(batch_of)
        settings = {"zero_stage": stage, "deepspeed": EVERYWHERE if stage == 3 else {}, "lr": 1e-5}
        run = with_difference(run_file(tmp_path / where, model_folder, **settings), where)
        assert run_learner(run, buffer, Stop()) == 0
        published.append([(one.manifest.SerializeToString(), one.payload()) for one in buffer.published])
    assert len(published[0]) == 5
    assert published[0] == published[1]
