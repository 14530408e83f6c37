"""Models as they are loaded for training."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from forebay.learner.pretrained import load_model
from tests.learner.models import VOCAB, random_groups
from tests.learner.trainers import run_file, scores, trainer_of


def test_a_model_that_came_with_dropout_answers_the_same_twice_while_it_is_trained(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert any(isinstance(module, torch.nn.Dropout) for module in load_model(str(tmp_path)).modules())
    _, roles = trainer_of(run_file(tmp_path))
    assert roles.actor.module.training
    assert torch.equal(*(scores(roles, random_groups(0)) for _ in range(2)))
