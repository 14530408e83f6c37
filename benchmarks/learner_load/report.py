"""What a training process says at its end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay.wire.trajectory import Trajectory


def report(trajectories: Sequence[Trajectory], seconds: Sequence[float], **more: Any) -> None:
    """Print it as JSON. `seconds`: of each step; the first one, which warms up, does not count."""
    tokens = sum(int(member.loss_mask.sum()) for member in trajectories)
    steady = sorted(seconds[1:])
    middle = steady[len(steady) // 2]
    found = {
        "trained_tokens_s": round(tokens / middle, 2),
        "step_s": [round(one, 2) for one in seconds],
        "peak_memory_mb": round(peak_memory_mb()),
        "tokens": tokens,
    }
    print(json.dumps(found | more), flush=True)


def peak_memory_mb() -> float:
    """The most memory that this process has had."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
