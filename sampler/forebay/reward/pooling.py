"""The same sequence classifiers, and others that vLLM knows, run by vLLM's pooling engine."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import MutableMapping, Sequence
from typing import Any

from forebay.config.reward_section import RewardModelSection
from forebay.errors import UsageError
from forebay.reward.checkpoint import Checkpoint
from forebay.reward.reader import TextReader
from forebay.reward.scorer import Problem, Text
from forebay.wire.v1 import reward_pb2

#: Texts in one of vLLM's steps at most.
MAX_SEQUENCES = 256
#: A cache of keys and values that suits a small model on a shared CPU machine.
CPU_KV_CACHE_BYTES = 1 << 30


class PoolingEngine:
    """A vLLM in this process: a batch is one call, and there are no processes to leave behind."""

    def __init__(self, llm: Any, reader: TextReader) -> None:
        from vllm import PoolingParams

        self._llm, self._reader = llm, reader
        self._raw = PoolingParams(use_activation=False)  # the logit itself; vLLM would give its sigmoid

    @classmethod
    def load(cls, name: str, section: RewardModelSection, source: str) -> PoolingEngine:
        """From a checkpoint folder or hub name; nothing in it is executed or unpickled.

        Raises UsageError, in one line, for what SequenceClassifier refuses, for a missing vLLM, and for what vLLM
        does not take.
        """
        if importlib.util.find_spec("vllm") is None:
            raise UsageError(f'reward.models.{name}.engine is "vllm", which needs vllm: pip install "forebay[sampler]"')
        checkpoint = Checkpoint(name, section, source)
        if checkpoint.reader.gives_parts:
            raise checkpoint.wrong('it reads pairs with token types; expected engine = "transformers"')
        prepare_environment(os.environ)
        return cls(_start(checkpoint), checkpoint.reader)

    def encode(self, conversation: reward_pb2.Conversation) -> list[Text | Problem]:
        """See Scorer."""
        return self._reader.encode(conversation)

    def score(self, batch: Sequence[Text]) -> list[float]:
        """See Scorer."""
        prompts = [{"prompt_token_ids": text.ids.tolist()} for text in batch]
        outputs = self._llm.classify(prompts, pooling_params=self._raw, use_tqdm=False)
        return [float(output.outputs.probs[0]) for output in outputs]  # so called, whatever they are


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """What vLLM reads from the environment when it is first imported; what the user set stays, but for one."""
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a process of its own would have to be watched and ended
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM's own choice waits for cores that others use


def _start(checkpoint: Checkpoint) -> Any:
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns about this and that while it is imported
    from vllm import LLM
    from vllm.platforms import current_platform

    try:
        return LLM(**_arguments(checkpoint, cpu=current_platform.is_cpu()))
    except (OSError, ValueError, RuntimeError, TypeError, NotImplementedError, AssertionError) as error:
        raise _refusal(checkpoint, str(error) or type(error).__name__) from error


def _arguments(checkpoint: Checkpoint, *, cpu: bool) -> dict[str, Any]:
    section, longest = checkpoint.section, checkpoint.reader.max_tokens
    stored = getattr(checkpoint.config, "dtype", None)
    arguments: dict[str, Any] = {
        "model": checkpoint.source,
        "runner": "pooling",
        "convert": "auto",
        # Where the run file says auto, the stored one: vLLM's own auto makes another of some.
        "dtype": str(stored).removeprefix("torch.") if section.dtype == "auto" and stored else section.dtype,
        "load_format": "safetensors",
        "max_model_len": longest,
        # Texts are read whole: a step holds what the batcher cuts, or one text.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(section.tokens_per_batch, longest),
        "max_num_seqs": MAX_SEQUENCES,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if cpu:
        arguments["enforce_eager"] = True
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    return arguments


def _refusal(checkpoint: Checkpoint, told: str) -> UsageError:
    if lacking := re.search(r"weights were not initialized from checkpoint: \{(.*?)\}", told):
        return checkpoint.untrained(", ".join(sorted(lacking[1].replace("'", "").split(", "))[:3]))
    return checkpoint.wrong(f"vLLM does not take it ({told.strip().splitlines()[0]})")
