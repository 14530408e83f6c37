"""How long to wait before trying again."""

from __future__ import annotations

import random

FIRST_S, LONGEST_S = 0.1, 5.0


def pause_after(tries: int, dice: random.Random) -> float:
    """Seconds before the next try: 0.1, twice as long after each, up to 5; cut by lot to no less than half."""
    return min(FIRST_S * 2.0 ** min(tries, 10), LONGEST_S) * dice.uniform(0.5, 1.0)
