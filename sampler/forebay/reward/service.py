"""`forebay reward`: one reward model of one run, until told to stop."""

from __future__ import annotations

import asyncio
import logging

from forebay.buffer.ports import check_address
from forebay.config.model_source import model_source
from forebay.config.models import ModelSection, RunFile
from forebay.config.reward_section import RewardModelSection
from forebay.errors import EXIT_DONE, UsageError
from forebay.reward.scorer import Scorer
from forebay.reward.server import RewardServer
from forebay.serving import in_thread, stop_signals

log = logging.getLogger(__name__)

#: How long calls in progress may take after SIGTERM.
GRACE_S = 20.0


def serve(run: RunFile, name: str) -> int:
    """Score with the run's reward model `name` until SIGTERM or SIGINT (drain; a second one: at once).

    Returns the exit code. Raises UsageError for an address, a model or a setting that cannot be used.
    """
    section = run.reward.models[name]
    for key, address in (("address", section.address), ("http", section.http)):
        if address is not None:
            here = f"reward.models.{name}.{key}"
            check_address(here, address, insecure=run.security.insecure, such_as="127.0.0.1:7090")
    return asyncio.run(_serve(run, name, section))


async def _serve(run: RunFile, name: str, section: RewardModelSection) -> int:
    stop = stop_signals()
    server = RewardServer(name, section.address, section.http)
    await server.start()
    log.info("loading %s; listening on %s meanwhile", section.path, server.address)
    stopping = asyncio.create_task(stop.wait())
    serving = asyncio.create_task(_load_and_serve(run, name, section, server))
    try:
        await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
    finally:
        await server.stop(GRACE_S if stopping.done() else 0.0)
        stopping.cancel()
        serving.cancel()
    return EXIT_DONE


async def _load_and_serve(run: RunFile, name: str, section: RewardModelSection, server: RewardServer) -> None:
    """For ever. Raises UsageError for a model that cannot be used, and whatever ends the judging."""
    scorer = await in_thread(lambda: load(name, section, run.run.seed))
    await server.open(scorer, tokens_per_batch=section.tokens_per_batch, gather_s=section.gather_s)
    log.info("reward model %s: serving on %s (http %s)", name, server.address, section.http or "not served")
    await server.failed()


def load(name: str, section: RewardModelSection, seed: int) -> Scorer:
    """The model in memory, made before if the run file says how. Raises UsageError."""
    try:
        source = model_source(ModelSection(path=section.path, make=section.make), seed)
    except UsageError as error:
        raise UsageError(f"reward.models.{name}.{str(error).removeprefix('model.')}") from error
    if section.engine == "vllm":
        from forebay.reward.pooling import PoolingEngine

        return PoolingEngine.load(name, section, source)
    from forebay.reward.classifier import SequenceClassifier  # torch, which takes seconds

    return SequenceClassifier.load(name, section, source)
