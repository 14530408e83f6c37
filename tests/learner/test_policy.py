"""Packed forward and backward against the plain float64 way."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import log_softmax

from forebay.learner.logprobs import selected_logprobs
from forebay.learner.loss import PolicyLoss
from forebay.learner.packing import MicroBatch, pack
from forebay.learner.policy import Policy
from forebay.learner.sample import Sample, with_advantage
from forebay.learner.tokens import Totals
from forebay.learner.trainer import tokens_of
from tests.learner import reference
from tests.learner.models import random_groups, run_file, tiny_llama

CAP = 2.0
LOSS = PolicyLoss.of(run_file(importance_cap=CAP))


def samples(seed: int, **shape: float) -> list[Sample]:
    """Random experience; the advantage is the reward."""
    return [with_advantage(t, t.reward) for t in random_groups(seed, **shape)]


def gradients(policy: Policy, batches: list[MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients summed over micro-batches."""
    policy.zero_grad()
    totals = Totals(tokens=sum(batch.targets for batch in batches), sequences=sum(len(b.samples) for b in batches))
    total = 0.0
    for batch in batches:
        logprob_t, entropy_t = policy(batch)
        loss = LOSS(tokens_of(batch, logprob_t), entropy_t, None, totals)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_equal_the_float64_reference(seed: int, tied: bool) -> None:
    model = tiny_llama(seed, tied=tied)
    batch = samples(seed)
    loss, ours = gradients(Policy(model), pack(batch, 64))
    plain = reference.in_float64(model)
    expected = reference.truncated_is_loss(plain, batch, CAP)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6, abs=1e-7)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert relative(ours[name], parameter.grad) < 5e-6, name


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_packed_sequences_do_not_see_each_other(top_p: float) -> None:
    model = tiny_llama().double()
    batch = samples(1, groups=6, members=4, longest=40, top_p=top_p)
    plain = reference.in_float64(model)
    for micro in pack(batch, 300):
        logprob_t, _ = Policy(model)(micro)
        alone_t = torch.cat([reference.logprobs(plain, sample.trajectory) for sample in micro.samples])
        torch.testing.assert_close(logprob_t, alone_t, rtol=1e-6, atol=1e-6)


def test_the_split_into_micro_batches_changes_nothing_but_noise() -> None:
    model = tiny_llama().double()
    batch = samples(2, groups=5, members=4)
    loss, whole = gradients(Policy(model), pack(batch, 10_000))
    for limit in (1, 17, 60):
        other_loss, parts = gradients(Policy(model), pack(batch, limit))
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in whole.items():
            assert relative(parts[name], gradient) < 1e-5


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunked_logprobs_equal_full_logits(chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(10, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(33, 16, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 33, (10,))
    temperature = torch.rand(10, dtype=torch.float64) + 0.5
    mixed = torch.randn(2, 10, dtype=torch.float64)

    logprob, entropy = selected_logprobs(hidden, weight, target, temperature, None, chunk)
    ours = torch.autograd.grad((mixed[0] * logprob + mixed[1] * entropy).sum(), [hidden, weight])
    full = log_softmax(hidden @ weight.T / temperature[:, None], -1)
    plain_entropy = -(full.exp() * full).sum(-1)
    plain_logprob = full[torch.arange(10), target]
    plain = torch.autograd.grad((mixed[0] * plain_logprob + mixed[1] * plain_entropy).sum(), [hidden, weight])
    torch.testing.assert_close(logprob, plain_logprob)
    torch.testing.assert_close(entropy, plain_entropy)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_nucleus_gradient_passes_gradcheck() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    target, ones = torch.tensor([0, 3, 8, 2]), torch.ones(4, dtype=torch.float64)
    top_p = torch.tensor([0.6, 0.9, 1.0, 0.3], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: selected_logprobs(h, w, target, ones, top_p, 3), (hidden, weight))


def test_gradient_checkpointing_changes_nothing() -> None:
    model = tiny_llama()
    batches = pack(samples(3), 64)
    _, plain = gradients(Policy(model), batches)
    plain = {name: gradient.clone() for name, gradient in plain.items()}
    model.gradient_checkpointing_enable()
    model.train()
    _, again = gradients(Policy(model), batches)
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient)
