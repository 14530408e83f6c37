"""Which rank of a learner this process is, as whoever launched it says through the environment (torchrun's names)."""

from __future__ import annotations

import os

#: Set by a learner that nobody launched and that made itself a group of one: its process and the group's port.
ALONE = "FOREBAY_ALONE"


def is_launched() -> bool:
    """Whether a launcher made this process a rank. What a lone learner has set for itself is nothing to its children,
    who would all want its port; unless somebody has set it anew for them."""
    process, _, port = os.environ.get(ALONE, "").partition(" ")
    own = process and port == os.environ.get("MASTER_PORT")
    return "RANK" in os.environ and not own


def is_alone() -> bool:
    """Whether this very process is a group of one already."""
    return os.environ.get(ALONE, "").partition(" ")[0] == str(os.getpid()) and not is_launched()


def be_alone(host: str, port: str) -> None:
    """Make this process a group of one that meets at `host:port`."""
    os.environ.update({ALONE: f"{os.getpid()} {port}"}, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)


def rank() -> int:
    """0 for the lead, and for a learner of one."""
    return int(os.environ["RANK"]) if is_launched() else 0


def ranks() -> int:
    """How many there are."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def ranks_here() -> int:
    """How many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if is_launched() else 1
