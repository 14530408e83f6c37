"""Learning rate, packing: small pieces, exact answers."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config.learner_section import LearnerSection
from forebay.learner.lr import learning_rate
from forebay.learner.packing import pack
from forebay.learner.sample import with_advantage
from tests.learner.models import random_groups


def test_the_learning_rate_warms_up_and_ends_low() -> None:
    settings_ = LearnerSection(lr=1.0, lr_warmup_steps=3, lr_schedule="cosine", steps=10)
    rates = [learning_rate(settings_, step) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert 0 < rates[-1] < 0.1
    constant = LearnerSection(lr=1.0)
    assert {learning_rate(constant, step) for step in range(1, 101)} == {1.0}


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), limit=st.integers(1, 200), groups=st.integers(1, 8), members=st.integers(1, 5))
def test_packing_loses_and_repeats_nothing(seed: int, limit: int, groups: int, members: int) -> None:
    samples = [with_advantage(t, 1.0) for t in random_groups(seed, groups=groups, members=members)]
    batches = pack(samples, limit)
    seen = [(s.trajectory.group_id, s.trajectory.member) for batch in batches for s in batch.samples]
    assert sorted(seen) == [(s.trajectory.group_id, s.trajectory.member) for s in samples]
    assert sum(batch.targets for batch in batches) == sum(sample.targets for sample in samples)
    for batch in batches:
        assert batch.tokens_n.numel() <= limit or len(batch.samples) == 1
        layout = batch.layout
        assert torch.equal(layout.token_r[layout.row_n], torch.arange(batch.tokens_n.numel()))
        assert len(layout.token_r) == batch.tokens_n.numel() + len(layout.padding)
        behaviour = np.concatenate([s.trajectory.logprobs[s.trajectory.loss_mask] for s in batch.samples])
        assert np.array_equal(batch.behaviour_t.numpy(), behaviour)
