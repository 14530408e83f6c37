"""Adapters: trained alone, saved as peft's, published alone, resumed bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from forebay.errors import UsageError
from forebay.learner.loop import run_learner
from forebay.learner.lora import load_actor
from forebay.learner.roles import load_roles
from forebay.learner.snapshot import published_tensors
from forebay.learner.stop import Stop
from forebay.learner.trainer import Trainer
from forebay.obs.phases import PhaseClock
from forebay.wire.weights import HostState
from tests.learner.fake_buffer import FakeBuffer
from tests.learner.models import random_groups
from tests.learner.test_engine import EVERYWHERE
from tests.learner.test_loop import batch_of, stopping_after, trainer_state
from tests.learner.test_loop import run_file as long_run
from tests.learner.trainers import batch_of as batch
from tests.learner.trainers import packed, run_file, scores

LORA: dict[str, Any] = {"lora": {"rank": 4}}


@pytest.mark.parametrize(("dtype", "stage"), [("float32", 0), ("float32", 2), ("bfloat16", 1)])
def test_updates_reach_the_adapter_alone(model_folder: Path, dtype: str, stage: int) -> None:
    run = run_file(model_folder, **LORA, compute_dtype=dtype, zero_stage=stage, lr=1e-2)
    model = load_actor(run, None)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    roles = load_roles(run, model)
    first = scores(roles, random_groups(9))
    Trainer(roles, run, PhaseClock()).train(1, batch(random_groups(0)))
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t.float(), before[n].to(t.dtype).float())}
    assert moved
    assert all("lora_" in name for name in moved)
    assert not torch.equal(scores(roles, random_groups(9)), first)
    trained = {name for name, _ in roles.state()}
    assert trained
    assert all("lora_" in name for name in trained), "the model has neither masters nor moments"


def test_the_reference_is_the_model_without_its_adapter(model_folder: Path) -> None:
    run = run_file(model_folder, **LORA, kl_coef=0.1, lr=1e-2)
    roles = load_roles(run, load_actor(run, None))
    first = scores(roles, random_groups(9))
    Trainer(roles, run, PhaseClock()).train(1, batch(random_groups(0)))
    assert roles.reference is not None
    again = torch.cat([roles.reference.logprobs(micro) for micro in packed(random_groups(9))])
    assert torch.equal(again, first)
    assert not torch.equal(scores(roles, random_groups(9)), first)


def test_a_run_publishes_the_adapter_and_its_checkpoint_is_pefts(tmp_path: Path, model_folder: Path) -> None:
    buffer, run = FakeBuffer(batch_of), long_run(tmp_path, model_folder, **LORA, lr=1e-2)
    assert run_learner(run, buffer, Stop()) == 0
    names = buffer.newest_weights().names
    assert names == sorted(published_tensors(load_actor(run, None)))
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)
    belongs_to = {one.manifest.model_digest for one in buffer.published}
    assert belongs_to == {HostState.from_safetensors(model_folder).digest()}
    folder = tmp_path / "learner" / "checkpoints" / "step_000004"
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in folder.iterdir()}
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokens = torch.arange(12)[None]
    plain = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, str(folder))
    assert float((adapted(tokens).logits - plain).abs().max()) > 1e-3


@pytest.mark.parametrize("stage", [1, 3])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path, model_folder: Path, stage: int) -> None:
    settings = {**LORA, "zero_stage": stage, "deepspeed": EVERYWHERE if stage == 3 else {}}
    straight, broken = FakeBuffer(batch_of), FakeBuffer(batch_of)
    assert run_learner(long_run(tmp_path / "a", model_folder, **settings), straight, Stop()) == 0
    run = long_run(tmp_path / "b", model_folder, **settings)
    assert run_learner(run, broken, stopping_after(broken, 2)) == 0
    broken.on_commit = lambda step: None
    assert run_learner(run, broken, Stop()) == 0
    expected, ours = trainer_state(tmp_path / "a", 4), trainer_state(tmp_path / "b", 4)
    assert expected.keys() == ours.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())
    assert broken.newest_weights().digest() == straight.newest_weights().digest()


@pytest.mark.parametrize(("target", "told"), [("q_prj", "names no module"), ("lm_head", "no linear layer inside")])
def test_a_target_that_cannot_have_an_adapter_is_named(model_folder: Path, target: str, told: str) -> None:
    with pytest.raises(UsageError, match=f'"{target}" .*{told}.*q_proj'):
        load_actor(run_file(model_folder, lora={"rank": 4, "targets": [target]}), None)
