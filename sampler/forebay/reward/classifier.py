"""A Hugging Face sequence classifier with one label as a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from forebay.config.reward_section import RewardModelSection
from forebay.reward.checkpoint import Checkpoint
from forebay.reward.reader import TextReader
from forebay.reward.scorer import Problem, Text
from forebay.wire.v1 import reward_pb2


class SequenceClassifier:
    """Scores are the one logit, as the model was trained to give it. B texts of at most T tokens at a time."""

    def __init__(self, model: Any, reader: TextReader, *, pad_id: int, device: torch.device) -> None:
        self._model, self._reader, self._pad_id, self._device = model, reader, pad_id, device

    @classmethod
    def load(cls, name: str, section: RewardModelSection, source: str) -> SequenceClassifier:
        """From a checkpoint folder or hub name; nothing in it is executed or unpickled.

        Raises UsageError, in one line, for what cannot be a reward model: several labels, no weights for the score,
        no padding token, no tokenizer.
        """
        disable_progress_bar()
        checkpoint = Checkpoint(name, section, source)
        device = _device(checkpoint)
        model, report = checkpoint.read(
            "weights",
            AutoModelForSequenceClassification.from_pretrained,
            config=checkpoint.config,
            dtype=section.dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
        if report["missing_keys"]:
            raise checkpoint.untrained(", ".join(sorted(report["missing_keys"])[:3]))
        model.eval().to(device)
        return cls(model, checkpoint.reader, pad_id=checkpoint.pad_id, device=device)

    def encode(self, conversation: reward_pb2.Conversation) -> list[Text | Problem]:
        """See Scorer."""
        return self._reader.encode(conversation)

    def score(self, batch: Sequence[Text]) -> list[float]:
        """See Scorer."""
        lengths, longest = [len(text) for text in batch], max(map(len, batch))
        mask_bt = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
        inputs = {"input_ids": _padded([text.ids for text in batch], longest, self._pad_id), "attention_mask": mask_bt}
        if batch[0].parts is not None:
            inputs["token_type_ids"] = _padded([text.parts for text in batch if text.parts is not None], longest, 0)
        with torch.inference_mode():
            logits_b1 = self._model(**{key: tensor.to(self._device) for key, tensor in inputs.items()}).logits
        scores: list[float] = logits_b1[:, 0].float().cpu().tolist()
        return scores


def _device(checkpoint: Checkpoint) -> torch.device:
    try:
        device = torch.device(checkpoint.section.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise checkpoint.wrong(f"device is {checkpoint.section.device!r}: {reason}") from error
    return device


def _padded(rows: Sequence[NDArray[np.int64]], longest: int, fill: int) -> torch.Tensor:
    """Rows to [B, T], filled up on the right."""
    padded_bt = np.full((len(rows), longest), fill, np.int64)
    for index, row in enumerate(rows):
        padded_bt[index, : len(row)] = row
    return torch.from_numpy(padded_bt)
