"""`forebay …` with the real supervisor and buffer, but stand-ins for sampler and learner."""

from __future__ import annotations

import sys

from forebay.cli import main, run
from forebay.fleet import services

ROLES = ("learner", "sampler")
REAL = services._forebay


def stand_in(*words: str) -> tuple[str, ...]:
    """The command of a service, sampler and learner replaced."""
    return (sys.executable, "-m", "tests.fleet.standins", *words) if words[0] in ROLES else REAL(*words)


if __name__ == "__main__":
    services._forebay = stand_in
    run.NEEDED = dict.fromkeys(ROLES, ())
    sys.exit(main.main())
