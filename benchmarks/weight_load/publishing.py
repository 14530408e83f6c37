"""How long training stands still for a publication, beside a bare copy of the same weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.buffer_load.server import serving
from benchmarks.weight_load.example import Example
from forebay.buffer.client import BlockingClient
from forebay.config.identity import run_json
from forebay.config.load import load
from forebay.config.model_source import model_source
from forebay.config.models import RunFile
from forebay.learner.pretrained import load_model
from forebay.learner.publisher import Publisher
from forebay.learner.snapshot import copy_to_host, host_specs, published_tensors

ANCHOR_EVERY = 1000
MOVED = 2e-6  #: what the masters move by, about


def publishing(example: Example, folder: Path, versions: int) -> dict[str, Any]:
    """Versions are offered one step of matrix products apart, as training would; each beside a bare copy."""
    with serving(folder / "publishing", example.sections()) as server:
        run = load([server.run_file], {})
        model = load_model(model_source(run.model, run.run.seed))
        dtype = getattr(torch, run.publish.dtype)
        room = {name: torch.empty(t.shape, dtype=dtype) for name, t in published_tensors(model).items()}
        stalls, copies = list[float](), list[float]()
        with _publisher(run, model, dtype) as publisher:
            for step in range(versions):
                _train(model)
                copies.append(_bare_copy(model, room))
                began = time.monotonic()
                publisher.offer(step, lambda state: copy_to_host(model, state))
                stalls.append(time.monotonic() - began)
            publisher.wait_stored(600.0)
    settled = stalls[3:]  # the first ones also take the memory of the host copies
    return {
        "learner_stall_s": round(statistics.median(settled), 4),
        "learner_stall_longest_s": round(max(settled), 4),
        "learner_stall_first_s": round(stalls[0], 4),
        "host_copy_s": round(statistics.median(copies[1:]), 4),
        "published_versions": versions,
    }


@contextmanager
def _publisher(run: RunFile, model: PreTrainedModel, dtype: torch.dtype) -> Iterator[Publisher]:
    with BlockingClient(run.buffer.listen) as client:
        joined = client.join("learner", "learner", "", "", run_json(run))
        client.rewind(0)
        publisher = Publisher(client, host_specs(model, dtype), joined.member.incarnation, ANCHOR_EVERY)
        try:
            yield publisher
        finally:
            publisher.close(60.0)


@torch.no_grad()
def _train(model: PreTrainedModel) -> None:
    """Move the masters a little, and keep the cores busy for about as long as a small step does."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=MOVED)
    square = torch.randn(1024, 1024)
    for _ in range(20):
        square = (square @ square) / 32


@torch.no_grad()
def _bare_copy(model: PreTrainedModel, room: dict[str, torch.Tensor]) -> float:
    began = time.monotonic()
    for name, tensor in published_tensors(model).items():
        room[name].copy_(tensor)
    return time.monotonic() - began
