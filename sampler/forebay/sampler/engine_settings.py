"""From the run file to vLLM's settings, and from vLLM's failures to one line that says what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from forebay.config.models import RunFile
from forebay.errors import ForebayError, UsageError
from forebay.sampler.errors import EngineDied
from forebay.sampler.plugin import BACKEND, ENGINE_LOG_VARIABLE

#: A cache of keys and values that suits a small model on a shared CPU machine.
CPU_KV_CACHE_BYTES = 1 << 30
#: Prompt and reply together, unless [sampler.engine] max_model_len says otherwise; and prompt tokens a batch.
CPU_MAX_MODEL_LEN, CPU_BATCHED_TOKENS = 8192, 2048
MAX_SEQUENCES = 256
_LOG_TAIL_BYTES = 200_000


def prepare_environment(environ: MutableMapping[str, str], log_path: Path, *, workers: int = 1) -> None:
    """What vLLM reads from the environment when it is first imported; what the user set stays."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    environ[ENGINE_LOG_VARIABLE] = str(log_path.resolve())
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the engine's processes log more, into their own file
    environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork would inherit gRPC's threads' locks
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if workers == 1:  # vLLM's own choice leaves a core out, and threads bound to a busy core wait for it
        environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def quiet_resource_tracker(environ: MutableMapping[str, str]) -> None:
    """vLLM leaves its shared memory to Python's resource tracker, which reports that as a leak. Before any process."""
    environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")


def engine_arguments(run: RunFile, folder: Path, *, cpu: bool, environ: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments for `AsyncEngineArgs`: ours, then [sampler.engine] on top.

    `folder` is the local checkpoint. Raises UsageError when a passed-through value would break exactness.
    """
    arguments: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": run.model.tokenizer or str(folder),
        "dtype": run.publish.dtype,
        "enable_prefix_caching": True,
        "max_num_seqs": min(MAX_SEQUENCES, max(16, run.sampler.concurrent_groups * run.learner.group_size)),
        "disable_log_stats": True,
    }
    if cpu:
        arguments |= _cpu_arguments(folder, run.sampler.engine.get("max_model_len"))
        if not environ.get("VLLM_CPU_KVCACHE_SPACE"):
            arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    arguments |= run.sampler.engine
    _refuse_lossy_dtype(run, str(arguments["dtype"]))
    return arguments | {
        "seed": 0,  # every request brings its own
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": BACKEND},
    }


def _cpu_arguments(folder: Path, max_model_len: int | None) -> dict[str, Any]:
    """No chunked prefill: in vLLM 0.32 a chunk of a request with a seed of its own ends the CPU engine ("CPU Generator
    does not use offset"). Prompts are then prefilled whole, so a batch must hold the longest.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    longest = max_model_len or min(config.get("max_position_embeddings", CPU_MAX_MODEL_LEN), CPU_MAX_MODEL_LEN)
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_model_len": longest,
        "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, longest),
    }


def _refuse_lossy_dtype(run: RunFile, dtype: str) -> None:
    if run.publish.dtype == "float32" and dtype not in ("float32", "float"):
        raise UsageError(
            f"sampler.engine.dtype is {dtype!r}, but publish.dtype is 'float32': the engine would round what the "
            "learner publishes; expected sampler.engine.dtype = 'float32', or publish.dtype = 'bfloat16'"
        )


def explain_start_failure(error: BaseException, log_path: Path) -> ForebayError:
    """The engine's last words in one line. A UsageError where a setting mends it."""
    words = _last_error(log_path) or f"{type(error).__name__}: {_first_line(str(error))}"
    if re.search(r"(?i)kv.?cache|out of memory|available memory|memory utilization|can't allocate memory", words):
        return UsageError(
            f"vLLM has too little memory for its cache ({words}): set sampler.engine.max_model_len lower, "
            "sampler.engine.kv_cache_memory_bytes or VLLM_CPU_KVCACHE_SPACE (GiB) to what is free, or free some "
            f"memory; the engine's log is {log_path}"
        )
    if isinstance(error, TypeError | ValueError | OSError):
        return UsageError(f"vLLM refuses its settings: {words}; check [model] and [sampler.engine]")
    return EngineDied(f"vLLM did not start: {words}; the engine's log is {log_path}")


def _last_error(log_path: Path) -> str | None:
    """The last `SomethingError: …` that the engine's processes printed, the root cause before its echoes."""
    if not log_path.exists():
        return None
    with log_path.open("rb") as log:
        log.seek(max(0, log_path.stat().st_size - _LOG_TAIL_BYTES))
        text = log.read().decode(errors="replace")
    found = re.findall(r"(?:^|\s)((?:[\w.]+\.)?\w*(?:Error|Exception): \S.*)$", text, flags=re.MULTILINE)
    causes = [
        line for line in found if "core initialization failed" not in line and "WorkerProc initialization" not in line
    ]
    return _first_line(causes[-1]) if causes else None


def _first_line(text: str) -> str:
    lines = text.strip().splitlines() or ["no message"]
    return lines[0] if len(lines[0]) <= 300 else lines[0][:300] + "…"
