"""The learning rate as a pure function of the step: nothing to save, nothing to resume."""

from __future__ import annotations

import math

from forebay.config.learner_section import LearnerSection


def learning_rate(settings: LearnerSection, step: int) -> float:
    """Rate of step 1, 2, ...: rises over the warm-up, then stays, or falls to 0 just after the last step."""
    if step <= settings.lr_warmup_steps:
        return settings.lr * step / (settings.lr_warmup_steps + 1)
    if settings.lr_schedule == "constant":
        return settings.lr
    left = (settings.steps + 1 - step) / max(1, settings.steps - settings.lr_warmup_steps)
    if settings.lr_schedule == "linear":
        return settings.lr * min(1.0, left)
    return settings.lr * (1 + math.cos(math.pi * (1 - min(1.0, left)))) / 2
