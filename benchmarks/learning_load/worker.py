"""A process that trains cells: `python -m benchmarks.learning_load.worker`, told over standard input."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.buffer_load.commands import obey
from benchmarks.learning_load.cells import Cell
from benchmarks.learning_load.lockstep import Lockstep


async def train(name: str, learner: Mapping[str, Any], age: int, seed: int, steps: int) -> dict[str, Any]:
    """One run of one cell."""
    outcome = Lockstep(Cell(name=name, learner=learner, age=age), seed, steps).run()
    gc.collect()
    return outcome.as_dict()


if __name__ == "__main__":
    torch.set_num_threads(1)  # two of these share two cores
    asyncio.run(obey({"train": train}))
