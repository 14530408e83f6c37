"""How long generation stands still for an update, beside vLLM's own reload, and how many tokens updates cost."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.buffer_load.server import serving
from benchmarks.weight_load.example import Example
from benchmarks.weight_load.generation import Load
from benchmarks.weight_load.sampler import Sampler, sampling
from forebay.config.load import load
from forebay.config.models import RunFile

WINDOW_S = 20.0  #: about; a whole number of steps

Action = Callable[[], Awaitable[float]]  #: returns for how many seconds generation stood still


@dataclass(slots=True)
class _Seen:
    """Seconds of each pause, and tokens a second of each window, by what was done."""

    idle: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    pauses: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    speeds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def installing(example: Example, folder: Path, rounds: int) -> dict[str, Any]:
    """A sampler generates; by turns nothing happens, each step brings a version, or vLLM reloads its files then."""
    with serving(folder / "installing", example.sections()) as server:
        seen = asyncio.run(_installing(load([server.run_file], {}), example.step_s, rounds))
    lost = {
        how: [1 - busy / free for busy, free in zip(seen.speeds[how], seen.speeds["nothing"], strict=True)]
        for how in ("update", "update_keeping", "reload")
    }
    pause_s, reload_s = _middle(seen.pauses["update"]), _middle(seen.pauses["reload"])
    return {
        "sampler_pause_s": pause_s,
        "engine_reload_s": reload_s,
        "sampler_pause_vs_reload": round(pause_s / reload_s, 2),
        "sampler_pause_idle_s": _middle(seen.idle["update"]),
        "engine_reload_idle_s": _middle(seen.idle["reload"]),
        "tokens_lost_share": _middle(lost["update"]),
        "tokens_lost_share_keeping": _middle(lost["update_keeping"]),
        "tokens_lost_share_reload": _middle(lost["reload"]),
        "tokens_lost_shares": {how: [round(share, 4) for share in shares] for how, shares in lost.items()},
        "tokens_s": {name: _middle(speeds) for name, speeds in seen.speeds.items()},
        "update_every_s": example.step_s,
    }


async def _installing(run: RunFile, step_s: float, rounds: int) -> _Seen:
    seen = _Seen()
    async with sampling(run, versions=2 * rounds * (1 + _steps(step_s))) as sampler:
        actions: dict[str, Action] = {
            "update": sampler.update,
            "update_keeping": sampler.update_keeping,
            "reload": sampler.reload,
        }
        for _ in range(rounds):
            for name, action in actions.items():
                seen.idle[name].append(await action())
        async with sampler.load.running():
            await sampler.load.tokens_s(2 * step_s)  # until it is as full as it stays
            for _ in range(rounds):
                await _round(sampler, actions, step_s, seen)
    return seen


async def _round(sampler: Sampler, actions: dict[str, Action], step_s: float, seen: _Seen) -> None:
    seen.speeds["nothing"].append(await sampler.load.tokens_s(_steps(step_s) * step_s))
    for name, action in actions.items():
        speed, pauses = await _window(sampler.load, action, step_s)
        seen.speeds[name].append(speed)
        seen.pauses[name] += pauses
    print(f"weight_sync: tokens/s {dict(seen.speeds)}, pauses {dict(seen.pauses)}", file=sys.stderr, flush=True)


async def _window(load_: Load, action: Action, step_s: float) -> tuple[float, list[float]]:
    """Tokens a second during some steps, and the pause of the `action` in the middle of each."""

    async def act() -> list[float]:
        pauses = []
        for step in range(_steps(step_s)):
            await asyncio.sleep(max(0.0, began + (step + 0.5) * step_s - time.monotonic()))
            pauses.append(await action())
        return pauses

    began = time.monotonic()
    return await asyncio.gather(load_.tokens_s(_steps(step_s) * step_s), act())


def _steps(step_s: float) -> int:
    """Steps in a window."""
    return round(WINDOW_S / step_s)


def _middle(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)
