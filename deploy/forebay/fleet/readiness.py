"""Wait until the buffer takes calls."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable

PROBE_TIMEOUT_S = 1.0
PROBE_EVERY_S = 0.1


def is_ready(http: str) -> bool:
    """Whether the buffer's `/readyz` answers 200."""
    try:
        with urllib.request.urlopen(f"http://{http}/readyz", timeout=PROBE_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_ready(ready: Callable[[], bool], going_on: Callable[[], bool], wait: Callable[[float], None]) -> bool:
    """Probe until ready; False when `going_on` said no. No deadline: reading a long journal takes its time."""
    while not ready():
        if not going_on():
            return False
        wait(PROBE_EVERY_S)
    return True
