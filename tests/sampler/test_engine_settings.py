"""Settings reach vLLM, and its failures reach the user in one line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.config.models import RunFile
from forebay.errors import UsageError
from forebay.sampler.engine_settings import engine_arguments, explain_start_failure, prepare_environment
from forebay.sampler.errors import EngineDied, GenerationFailed
from forebay.sampler.generation import from_vllm, request_seed
from forebay.wire.version import Version

MEMORY = """
(EngineCore pid=1) Traceback (most recent call last):
ValueError: To serve at least one request with the models's max seq len (8192), (1.4 GiB KV cache is needed)
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def run_with(engine: dict[str, Any], **publish: Any) -> RunFile:
    return RunFile.model_validate(
        {"run": {"name": "t"}, "model": {"path": "m"}, "task": {"name": "t:t"}, "sampler": {"engine": engine}}
        | {"publish": publish}
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100000}')
    return tmp_path


def test_ours_stands_and_the_users_goes_on_top(checkpoint: Path) -> None:
    arguments = engine_arguments(
        run_with({"max_model_len": 77, "enforce_eager": False}), checkpoint, cpu=True, environ={}
    )
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["weight_transfer_config"] == {"backend": "forebay"}
    assert (arguments["max_model_len"], arguments["enforce_eager"]) == (77, False)
    assert arguments["dtype"] == "bfloat16"
    assert arguments["kv_cache_memory_bytes"] == 1 << 30


def test_cpu_prefills_whole_prompts_in_batches_that_hold_the_longest(checkpoint: Path) -> None:
    arguments = engine_arguments(run_with({}), checkpoint, cpu=True, environ={})
    assert arguments["enable_chunked_prefill"] is False
    assert (arguments["max_model_len"], arguments["max_num_batched_tokens"]) == (8192, 8192)


def test_cache_size_is_the_users_where_he_said_one(checkpoint: Path) -> None:
    environ = {"VLLM_CPU_KVCACHE_SPACE": "3"}
    assert "kv_cache_memory_bytes" not in engine_arguments(run_with({}), checkpoint, cpu=True, environ=environ)
    assert "kv_cache_memory_bytes" not in engine_arguments(run_with({}), checkpoint, cpu=False, environ={})


def test_engine_that_would_round_the_weights_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="the engine would round"):
        engine_arguments(run_with({"dtype": "bfloat16"}, dtype="float32"), checkpoint, cpu=True, environ={})


def test_environment_of_the_user_stays(tmp_path: Path) -> None:
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "1"}
    prepare_environment(environ, tmp_path / "deep" / "engine.log")
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert environ["FOREBAY_ENGINE_LOG"] == str(tmp_path / "deep" / "engine.log")


def test_too_little_memory_is_a_usage_error_with_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(MEMORY)
    explained = explain_start_failure(RuntimeError("Engine core initialization failed."), log)
    assert isinstance(explained, UsageError)
    assert "\n" not in str(explained)
    assert "too little memory for its cache (ValueError: To serve at least one request" in str(explained)
    assert "sampler.engine.max_model_len" in str(explained)


def test_other_deaths_name_cause_and_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(
        "ImportError: no such kernel\nRuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    explained = explain_start_failure(RuntimeError("Engine core initialization failed."), log)
    assert isinstance(explained, EngineDied)
    assert "ImportError: no such kernel" in str(explained)
    assert str(log) in str(explained)
    assert isinstance(explain_start_failure(ValueError("bad model"), tmp_path / "none"), UsageError)


def _output(**changes: Any) -> SimpleNamespace:
    flat = SimpleNamespace(start_indices=[0, 1], token_ids=[5, 1], logprobs=[-0.5, -0.25])
    span = SimpleNamespace(version="2.7", start=0, end=2)
    fields = {"finish_reason": "stop", "token_ids": [5, 1], "logprobs": flat, "weight_versions": [span]} | changes
    return SimpleNamespace(**fields)


def test_reply_is_read_whole() -> None:
    reply = from_vllm(_output(), 0.5)
    assert reply.tokens.tolist() == [5, 1]
    np.testing.assert_array_equal(reply.logprobs, np.array([-0.5, -0.25], dtype=np.float32))
    assert [(span.start, span.version) for span in reply.spans] == [(0, Version(2, 7))]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": "abort"}, "ended the request with 'abort'"),
        ({"token_ids": [5, 2]}, "do not belong to its tokens"),
        ({"token_ids": [5]}, "do not belong to its tokens"),
        ({"weight_versions": None}, "do not cover"),
        ({"weight_versions": [SimpleNamespace(version="1.0", start=0, end=1)]}, "do not cover"),
        (
            {"logprobs": SimpleNamespace(start_indices=[0, 1], token_ids=[5, 1], logprobs=[-0.5, float("nan")])},
            "not finite",
        ),
    ],
)
def test_reply_that_lacks_anything_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationFailed, match=message):
        from_vllm(_output(**changes), 0.5)


def test_seeds_differ_by_run_group_and_member() -> None:
    seeds = {request_seed(run, group, member) for run in range(3) for group in range(20) for member in range(8)}
    assert len(seeds) == 480
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert request_seed(1, 11, 1) != request_seed(1, 1, 11)
