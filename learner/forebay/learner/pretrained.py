"""Loading the model that is trained, and refusing what could not be trained exactly."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from forebay.config.models import ModelSection
from forebay.errors import UsageError
from forebay.learner.attention import ATTENTION, register


def load_model(path: str) -> PreTrainedModel:
    """The causal model at `path` (Hugging Face name or folder) in float32, with packed attention and without dropout.

    Raises UsageError when it is missing, unreadable, or of a kind whose numbers packing would change.
    """
    register()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=ATTENTION
        )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"model.path: cannot load {path!r}: {_first_line(error)}") from error
    _check(model, path)
    _remove_dropout(model)
    return model


def load_scorer(path: str) -> PreTrainedModel | None:
    """The reward model at `path` (a sequence classifier with one label), loaded as `load_model` does; None when what is
    there is another kind of model. Raises UsageError."""
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"learner.critic.path: cannot load {path!r}: {_first_line(error)}") from error
    if not any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        return None
    register()
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, attn_implementation=ATTENTION
    )
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear) or head.out_features != 1:
        raise UsageError(f"learner.critic.path: {path!r} is no reward model; expected a `score` layer with one label")
    _remove_dropout(model)
    return model


def load_tokenizer(section: ModelSection) -> Any | None:
    """The tokenizer, saved with every checkpoint; None (and a warning) when there is none to find."""
    path = section.tokenizer or section.path
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        logging.getLogger(__name__).warning("no tokenizer at %r, checkpoints go without: %s", path, _first_line(error))
        return None


def _check(model: PreTrainedModel, path: str) -> None:
    config, head = model.config, model.get_output_embeddings()
    troubles = {
        "its output layer is not one matrix": head is None or getattr(head, "bias", None) is not None,
        "it caps its logits": bool(getattr(config, "final_logit_softcapping", None)),
        "it scales its logits": getattr(config, "logit_scale", 1) != 1 or getattr(config, "logits_scaling", 1) != 1,
        "it caps its attention scores": bool(getattr(config, "attn_logit_softcapping", None)),
        "it has sliding-window attention": "sliding_attention" in (getattr(config, "layer_types", None) or ()),
    }
    for trouble, applies in troubles.items():
        if applies:
            raise UsageError(f"model.path: {path!r} ({config.model_type}) cannot be trained here: {trouble}")


def _remove_dropout(model: PreTrainedModel) -> None:
    """With it, two passes over the same weights would differ, and a ratio of 1 would not be 1."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
