"""The critic: the model's own body with one number a token for a head, and what it learns.

Shape suffixes: t trained tokens, n packed tokens, e hidden size.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from forebay.config.learner_section import LearnerSection
from forebay.config.models import RunFile
from forebay.learner.engine import Engine
from forebay.learner.packing import MicroBatch
from forebay.learner.pretrained import load_model, load_scorer
from forebay.learner.sequence_parallel import hidden_at_targets


class ValueModel(nn.Module):
    """Values of the states before each trained token. The head starts at 0, an unknown future is worth nothing; or it
    is that of the reward model that the critic starts from."""

    def __init__(self, model: PreTrainedModel, score: nn.Linear | None = None) -> None:
        super().__init__()
        self.body = model.base_model
        self.head = nn.Linear(model.config.hidden_size, 1, bias=True)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if score is not None:
            with torch.no_grad():
                self.head.weight.copy_(score.weight)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Value [t], float32 at least."""
        own = hidden_at_targets(self.body, batch)
        value_o: torch.Tensor = self.head(own.hidden_oe)[:, 0]
        return own.everywhere(value_o if value_o.dtype == torch.float64 else value_o.float())


def value_loss(
    value_t: torch.Tensor, first_t: torch.Tensor, return_t: torch.Tensor, clip: float, tokens: int
) -> torch.Tensor:
    """This micro-batch's share of the minibatch's loss, with PPO's value clipping (arXiv 2005.12729, "PPO2"):

    1/(2N) sum_t max( (V_t - R_t)^2, (clip(V_t, V0_t - clip, V0_t + clip) - R_t)^2 )

    `first_t`: the values as the step began, V0; `clip` 0: no clipping; `tokens`: N of the whole minibatch.
    """
    error_t = (value_t - return_t).square()
    if clip:
        near_t = torch.clamp(value_t, first_t - clip, first_t + clip)
        error_t = torch.maximum(error_t, (near_t - return_t).square())
    return error_t.sum() / (2 * tokens)


def load_critic(run: RunFile) -> Engine[torch.Tensor]:
    """A critic in an engine of its own: it knows nothing yet, or what a reward model knows. Raises UsageError."""
    settings = run.learner
    path = settings.critic.path or run.model.path
    scorer = load_scorer(path)
    model = scorer or load_model(path)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return Engine(ValueModel(model, getattr(scorer, "score", None)).train(), critic_settings(settings))


def critic_settings(settings: LearnerSection) -> LearnerSection:
    """The learner's, with the critic's own learning rate."""
    return settings.model_copy(update={"lr": settings.critic.lr})
