"""`forebay reference`: the reference model of a run, until told to stop."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import torch

from forebay.buffer.ports import check_address
from forebay.config.models import RunFile
from forebay.errors import EXIT_DONE, UsageError
from forebay.learner.reference.model import ReferenceModel
from forebay.learner.reference.server import ReferenceServer
from forebay.serving import in_thread, stop_signals

log = logging.getLogger(__name__)

#: How long calls in progress may take after SIGTERM.
GRACE_S = 20.0


def serve(run: RunFile) -> int:
    """Answer until SIGTERM or SIGINT (drain; a second one: at once). Returns the exit code.

    Raises UsageError for an address or a model that cannot be used.
    """
    address = run.learner.reference.address
    if address is None:
        raise UsageError('the run file says nowhere to listen; expected learner.reference.address = "HOST:PORT"')
    check_address("learner.reference.address", address, insecure=run.security.insecure, such_as="127.0.0.1:7095")
    return asyncio.run(_serve(run, address))


async def _serve(run: RunFile, address: str) -> int:
    stop, name = stop_signals(), run.learner.reference.path or run.model.path
    server = ReferenceServer(name, address)
    await server.start()
    log.info("loading %s; listening on %s meanwhile", name, server.address)
    stopping = asyncio.create_task(stop.wait())
    loading = in_thread(lambda: ReferenceModel(run, torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    try:
        first: set[asyncio.Future[Any]] = {stopping, loading}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            await server.open(loading.result(), tokens_per_microbatch=run.learner.tokens_per_microbatch)
            log.info("reference model %s: serving on %s", name, server.address)
            await stopping
    finally:
        await server.stop(GRACE_S if stopping.done() else 0.0)
        stopping.cancel()
        loading.cancel()
    return EXIT_DONE
