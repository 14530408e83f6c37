"""The policy's loss: an objective, a correction, an aggregation, and what is added to them.

    loss = sum_t share_t ( -w_t s_t  -  entropy_coef H_t  +  kl_coef k_t )

s_t: `objectives`; w_t: `corrections`; share_t: `aggregation`; H_t: entropy of the processed distribution; k_t: estimate
of the KL to the reference model, where `kl_in = "loss"`. Entropy and KL are counted at every trained token, also of
groups that told nothing apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forebay.config.models import RunFile
from forebay.learner.aggregation import Aggregate, aggregate
from forebay.learner.corrections.correction import Correction
from forebay.learner.corrections.table import correction
from forebay.learner.kl import ESTIMATES, KlEstimate
from forebay.learner.objectives.objective import Objective
from forebay.learner.objectives.table import objective
from forebay.learner.tokens import Tokens, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The parts, put together."""

    objective: Objective
    correction: Correction
    aggregate: Aggregate
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimate: KlEstimate

    @classmethod
    def of(cls, run: RunFile) -> PolicyLoss:
        """As the run file says."""
        settings = run.learner
        return cls(
            objective=objective(settings),
            correction=correction(settings),
            aggregate=aggregate(run),
            entropy_coef=settings.entropy_coef,
            kl_coef=settings.kl_coef if settings.kl_in == "loss" else 0.0,
            kl_estimate=ESTIMATES[settings.kl_estimator],
        )

    def __call__(
        self, tokens: Tokens, entropy_t: torch.Tensor, reference_t: torch.Tensor | None, totals: Totals
    ) -> torch.Tensor:
        """This micro-batch's share of the minibatch's loss, a scalar; the shares add up."""
        term_t = -self.correction(tokens) * self.objective.surrogate(tokens)
        if self.entropy_coef:
            term_t = term_t - self.entropy_coef * entropy_t
        if self.kl_coef:
            assert reference_t is not None, "a kl_coef comes with a reference model"
            term_t = term_t + self.kl_coef * self.kl_estimate(tokens.current_t, reference_t)
        return (self.aggregate(tokens.sequences, totals).to(term_t.dtype) * term_t).sum()
