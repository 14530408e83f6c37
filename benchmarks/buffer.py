"""The buffer service beside its peers: `python -m benchmarks.buffer [--quick] [--only SECTION ...] [--soak MINUTES]`.

Every section starts a real `forebay buffer` process with its journal on a real disk, and load processes that speak to
it through `forebay.buffer.client`. Only rows that were acknowledged (in) or arrived (out) are counted. A row is one
trajectory of the given size, its bytes random. The peers, TransferQueue and Reverb, get rows of the same sizes in the
same run, each in an environment of its own under `.peers/`, made when it is missing.
Progress goes to standard error; the last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.buffer_load import backlog, bulk, peers, recovery, single, snapshot, soak, streams
from benchmarks.buffer_load.plan import FULL, QUICK, Plan

ROOT = Path(__file__).parents[1]

Section = Callable[[Plan, Path], dict[str, Any]]

SECTIONS: Mapping[str, Section] = {
    "rows_1k": bulk.rows_1k,
    "rows_64k": bulk.rows_64k,
    "rows_1m": bulk.rows_1m,
    "single": single.single,
    "cost": backlog.cost,
    "reverb": peers.reverb,
    "transferqueue": peers.transferqueue,
    "streams": streams.streams,
    "recovery": recovery.recovery,
    "snapshot": snapshot.snapshot,
}

#: What `--quick` leaves out unless asked for.
SLOW = frozenset({"streams", "recovery", "snapshot"})

#: Ratio, and the two figures that make it.
RATIOS = {
    "vs_transferqueue_append": ("append_1k_rows_s", "transferqueue_append_1k_rows_s"),
    "vs_reverb_append": ("append_1k_rows_s", "reverb_append_1k_rows_s"),
    "vs_reverb_append_group_items": ("append_1k_rows_s", "reverb_append_1k_group_items_rows_s"),
    "vs_transferqueue_append_64k": ("append_64k_mb_s", "transferqueue_append_64k_mb_s"),
    "vs_reverb_append_64k": ("append_64k_mb_s", "reverb_append_64k_mb_s"),
    "vs_transferqueue_lease": ("lease_1k_rows_s", "transferqueue_get_1k_rows_s"),
    "vs_reverb_lease": ("lease_1k_rows_s", "reverb_sample_1k_rows_s"),
    "vs_reverb_lease_1m": ("lease_1m_mb_s", "reverb_sample_1m_mb_s"),
}


def main(argv: Sequence[str]) -> int:
    """Measure, print the figures; 1 when something failed, which then stands under `error`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buffer", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller amounts, under 50 s once the peers are installed")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--soak", type=int, default=0, metavar="MINUTES", help="only constant load, for so long")
    parser.add_argument("--folder", type=Path, default=ROOT.parent, help="on the disk that is to be measured")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="forebay-buffer-", dir=arguments.folder) as scratch:
        if arguments.soak:
            found = soak.soak(arguments.soak, Path(scratch))
        else:
            names = arguments.only or [name for name in SECTIONS if not (arguments.quick and name in SLOW)]
            found = measure(QUICK if arguments.quick else FULL, Path(scratch), names)
    print(json.dumps(found))
    return 1 if "error" in found else 0


def measure(plan: Plan, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """The figures of the named sections in one object; what failed is told under `error`."""
    found: dict[str, Any] = {}
    failed: list[str] = []
    for name in names:
        began = time.monotonic()
        try:
            figures = SECTIONS[name](plan, folder)
        except (RuntimeError, OSError) as error:
            figures = {}
            failed.append(f"{name}: {error}")
        if "error" in figures:
            failed.append(f"{name}: {figures.pop('error')}")
        found |= figures
        print(f"buffer: {name} ({time.monotonic() - began:.1f} s): {_told(figures)}", file=sys.stderr, flush=True)
    found |= ratios(found, names)
    if failed:
        found["error"] = "; ".join(failed)
    return found


def ratios(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, float | None]:
    """Ours over the peers' that were asked for; None where one of the two is missing."""
    return {
        name: round(found[ours] / found[theirs], 2) if found.get(ours) and found.get(theirs) else None
        for name, (ours, theirs) in RATIOS.items()
        if theirs.partition("_")[0] in names
    }


def _told(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in figures.items()) or "failed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
