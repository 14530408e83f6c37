"""vLLM behind four verbs: generate, install, adopt, stop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forebay.config.models import RunFile, SamplerSection
from forebay.errors import ForebayError, UsageError
from forebay.sampler.engine_settings import engine_arguments, explain_start_failure, prepare_environment
from forebay.sampler.errors import EngineDied, GenerationFailed, InstallFailed
from forebay.sampler.generation import Generation, from_vllm
from forebay.wire.version import Version

log = logging.getLogger("forebay.sampler.engine")

#: A pause waits for one scheduler step; longer than this and the engine is stuck.
PAUSE_DEADLINE_S = 120.0
INSTALL_DEADLINE_S = 600.0
#: How often a silent engine is asked whether it is alive.
WATCH_EVERY_S = 1.0
#: The name of the weights that the engine loaded from disk, until somebody knows better.
UNNAMED = Version(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """A version's bytes in this machine's memory: what `install` hands to the engine's workers."""

    path: str  #: openable by the workers, /proc/PID/fd/N
    nbytes: int
    layout: list[dict[str, Any]]
    version: Version
    digest: bytes

    def pointer(self) -> dict[str, Any]:
        """The JSON that crosses to the workers."""
        return {**asdict(self), "version": str(self.version), "digest": self.digest.hex()}


class Engine:
    """A running vLLM. Made by `start`; every method belongs to the event loop that started it."""

    def __init__(self, llm: Any, keeper: _Keeper, sampling: SamplerSection, max_tokens: int) -> None:
        self._llm: Any = llm
        self._keeper = keeper
        self._sampling = sampling
        self._serving: HostCopy | None = None
        self._installing = asyncio.Lock()
        self._broken: str | None = None
        self.max_model_tokens = max_tokens  #: prompt and reply together

    @classmethod
    async def start(cls, run: RunFile, folder: Path, log_path: Path) -> Engine:
        """Start vLLM on the checkpoint in `folder`; its processes print into `log_path`.

        Raises UsageError for what a setting mends, EngineDied otherwise.
        """
        workers = int(run.sampler.engine.get("tensor_parallel_size", 1))
        prepare_environment(os.environ, log_path, workers=workers)
        logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns about this and that while it is imported
        await asyncio.to_thread(log_path.unlink, missing_ok=True)
        keeper = _Keeper(lambda: _build(run, folder))
        try:
            llm = await asyncio.wrap_future(keeper.built)
            await llm.update_weight_version(str(UNNAMED))
        except ForebayError:
            raise
        except asyncio.CancelledError:
            keeper.release()  # and with the thread its engine, even a half-made one
            raise
        except Exception as error:
            raise explain_start_failure(error, log_path) from error
        return cls(llm, keeper, run.sampler, llm.model_config.max_model_len)

    @property
    def version(self) -> Version | None:
        """The weights that serve; None before `adopt` or `install` named them."""
        return self._serving.version if self._serving else None

    async def generate(
        self, prompt_tokens: Sequence[int], *, seed: int, max_tokens: int, request_id: str, greedy: bool = False
    ) -> Generation:
        """One reply. Cancelling the caller aborts the request.

        Raises GenerationFailed when this request failed, EngineDied when none can succeed any more.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        started = time.monotonic()
        # The salt keeps what older weights have cached from requests that come after them.
        prompt = {"prompt_token_ids": list(prompt_tokens), "cache_salt": str(self.version)}
        final: Any = None
        try:
            async for output in self._llm.generate(prompt, self._parameters(seed, max_tokens, greedy), request_id):
                final = output
        except EngineDeadError as error:
            raise EngineDied("vLLM's engine process died; its log says why") from error
        except (ValueError, RuntimeError) as error:
            raise GenerationFailed(f"request {request_id}: {error}") from error
        if self._broken:
            raise EngineDied(self._broken)
        if final is None:
            raise GenerationFailed(f"request {request_id} ended without a reply")
        return from_vllm(final.outputs[0], time.monotonic() - started)

    async def watch(self) -> None:
        """Return never; raise EngineDied when vLLM is gone, also while nothing is asked of it."""
        # vLLM has no event for it
        while not self._llm.errored:  # noqa: ASYNC110
            await asyncio.sleep(WATCH_EVERY_S)
        raise EngineDied("vLLM's engine process died; its log says why")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early; their `generate` raises GenerationFailed."""
        await self._llm.abort(list(request_ids))

    async def adopt(self, copy: HostCopy) -> None:
        """The engine holds exactly these weights already (it loaded them from disk): name them, change nothing."""
        await self._llm.update_weight_version(str(copy.version))
        self._serving = copy

    async def install(self, copy: HostCopy, *, put_back: Callable[[], None]) -> float:
        """Swap the weights under the requests in flight; returns for how many seconds generation stood still.

        Requests go on where they were, with their cached keys and values or, as `sampler.in_flight` says, without.
        Whatever fails, `put_back` is called in a thread to make the bytes of what served before whole again. Raises
        InstallFailed when the old version serves again, EngineDied when it could not be put back.
        """
        return await asyncio.shield(asyncio.ensure_future(self._install(copy, put_back)))

    async def _install(self, copy: HostCopy, put_back: Callable[[], None]) -> float:
        async with self._installing:
            try:
                return await self._paused_swap(copy, put_back)
            except BaseException:
                await asyncio.to_thread(put_back)
                raise

    async def _paused_swap(self, copy: HostCopy, put_back: Callable[[], None]) -> float:
        if self._serving is not None:
            _refuse_other_tensors(self._serving, copy)
        try:
            await self._pause()
            paused = time.monotonic()
            await self._swap(copy, put_back)
        finally:
            await self._llm.resume_generation()
        return time.monotonic() - paused

    async def _pause(self) -> None:
        """Return when the engine's last step has ended; requests in flight stay."""
        forget = self._sampling.in_flight == "recompute"
        async with asyncio.timeout(PAUSE_DEADLINE_S):
            # AsyncLLM.pause_generation does this, and then sleeps for 20 ms so that outputs arrive in a tidy order.
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=forget)

    async def _swap(self, copy: HostCopy, put_back: Callable[[], None]) -> None:
        try:
            await self._load(copy)
        except Exception as error:
            await asyncio.to_thread(put_back)
            await self._restore(copy, error)
            raise InstallFailed(f"version {copy.version} could not be installed: {_cause(error)}") from error
        self._serving = copy

    async def _restore(self, failed: HostCopy, error: Exception) -> None:
        try:
            if self._serving is None:
                raise RuntimeError("nothing was installed before it")
            await self._load(self._serving)
        except Exception as second:
            self._broken = (
                f"version {failed.version} could not be installed ({_cause(error)}), nor the old one put back "
                f"({_cause(second)}): the engine's weights are unknown"
            )
            raise EngineDied(self._broken) from second

    async def _load(self, copy: HostCopy) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with asyncio.timeout(INSTALL_DEADLINE_S):
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=copy.pointer()))
            await self._llm.finish_weight_update(str(copy.version))

    def _parameters(self, seed: int, max_tokens: int, greedy: bool) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=0.0 if greedy else self._sampling.temperature,
            top_p=1.0 if greedy else self._sampling.top_p,
            seed=None if greedy else seed,
            max_tokens=max_tokens,
            stop=list(self._sampling.stop) or None,
            detokenize=bool(self._sampling.stop),  # only a stop text needs the text
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def stop(self) -> None:
        """End vLLM's processes. Idempotent."""
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None
        self._keeper.release()


class _Keeper(threading.Thread):
    """Builds the engine beside the event loop, and stays alive as long as the engine.

    The engine's processes ask the kernel to die with the thread that started them, so that must not be a worker of a
    thread pool, which may end at any time.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        super().__init__(name="engine-keeper", daemon=True)
        self.built: Future[Any] = Future()
        self._build = build
        self._released = threading.Event()
        self.start()

    def run(self) -> None:
        """Thread body."""
        built = self.built
        built.set_running_or_notify_cancel()  # from here on nobody's cancellation reaches it
        try:
            built.set_result(self._build())
        except BaseException as error:
            built.set_exception(error)
        else:
            self._released.wait()

    def release(self) -> None:
        """Let the thread end, and forget the engine."""
        self._released.set()
        self.built = Future()


def _build(run: RunFile, folder: Path) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(run, folder, cpu=current_platform.is_cpu(), environ=os.environ)
    try:
        settings = AsyncEngineArgs(**arguments)
    except TypeError as error:
        raise UsageError(f"sampler.engine: {_cause(error)}; expected vLLM engine arguments") from error

    class StoppedByHand(AsyncLLM):  # type: ignore[misc]
        """`Engine.stop` ends it; vLLM's finalizer would do so again while the interpreter ends, and fail aloud."""

        def __del__(self) -> None:
            pass

    return StoppedByHand.from_engine_args(settings)


def _refuse_other_tensors(serving: HostCopy, copy: HostCopy) -> None:
    """A fused module that gets only some of its parts would serve garbage, and vLLM would only log it.

    What serves came from the checkpoint or passed this, so it names all that the model needs. Tensors beyond it are the
    model's `load_weights` to judge (a tied head, say).
    """
    offered = {slot["name"]: tuple(slot["shape"]) for slot in copy.layout}
    wrong = [slot["name"] for slot in serving.layout if offered.get(slot["name"]) != tuple(slot["shape"])]
    if wrong:
        raise InstallFailed(
            f"version {copy.version} could not be installed: {len(wrong)} of the model's tensors are missing from it "
            f"or have another shape, the first is {wrong[0]}"
        )


def _cause(error: BaseException) -> str:
    text = str(error).strip()
    with suppress(IndexError):
        return text.splitlines()[0]
    return type(error).__name__
