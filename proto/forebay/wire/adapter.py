"""Adapters of low rank on the wire: the names that their tensors have, which are those in peft's files.

base_model.model.MODULE.lora_A.weight [rank, inputs]     base_model.model.MODULE.lora_B.weight [outputs, rank]
"""

from __future__ import annotations

#: Before the names of the model's own modules.
PREFIX = "base_model.model."
