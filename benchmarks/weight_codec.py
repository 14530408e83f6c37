"""How small exact updates are, and how fast: `python -m benchmarks.weight_codec [--quick] [--runs FOLDER]`.

The updates are real (`benchmarks.weight_updates`): SmolLM2-135M at three learning rates, from step 6 to one, five and
ten steps later. Runs that are not in FOLDER yet are made first, about five minutes each. `--quick` has a synthetic
one instead (float32 masters that move by about 5e-7 and are rounded to bfloat16), which says little about real sizes.
Beside our codecs stand the formats of peers (`benchmarks.peer_weight_formats`), over the same updates.

Sizes are payload bytes without the manifest, for the peers' as for ours. Speeds are bytes of the whole model a second:

    encode   `encode_delta` from two host states to named chunks: compare, code, compress, digests
    apply    `apply` of a received payload in place: chunk digests, decompress, write, digest of the whole state
    verify   the fingerprint of the whole state worked out anew
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import peer_weight_formats, weight_updates
from forebay.wire.host_state import HostState
from forebay.wire.version import Version
from forebay.wire.weights import Encoded, apply, encode_anchor, encode_delta

RATES = ("1e-6", "3e-6", "1e-5")
EVERY = (1, 5, 10)
SPARSE = 0.10  #: share of changed elements up to which the peers are compared
_OLD, _NEW = Version(1, 0), Version(1, 1)
_ROUNDS = 5


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_codec", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one synthetic update, in under 50 s")
    parser.add_argument("--runs", type=Path, default=weight_updates.ROOT / "runs" / "weight_updates")
    arguments = parser.parse_args(argv)
    found = quick() if arguments.quick else full(arguments.runs)
    print(json.dumps(found))
    return 0


def full(runs: Path) -> dict[str, Any]:
    """Nine cells."""
    cells = []
    for rate in RATES:
        run = runs / f"lr_{rate}"
        weight_updates.make_run(run, float(rate))
        steps = [weight_updates.FIRST, *(weight_updates.FIRST + every for every in EVERY)]
        (_, base), *later = weight_updates.states(run, steps)
        cells += [cell(rate, step - weight_updates.FIRST, base, new) for step, new in later]
    return summary(cells)


def quick() -> dict[str, Any]:
    """One cell."""
    return summary([cell("synthetic", 1, *weight_updates.synthetic())])


def cell(rate: str, every: int, base: HostState, new: HostState) -> dict[str, Any]:
    """One update in every form, and how fast ours is."""
    gaps = _delta(base, new, classes=False)
    classes = _delta(base, new, classes=True)
    anchor = encode_anchor(new, version=_NEW)
    changed = gaps.manifest.changed
    sizes = {
        "gap_ulp": gaps.manifest.payload_bytes,
        "class_ulp": classes.manifest.payload_bytes,
        "anchor": anchor.manifest.payload_bytes,
        **peer_weight_formats.sizes(base, new),
    }
    found = {
        "lr": rate,
        "every": every,
        "changed": round(changed / gaps.manifest.elements, 5),
        "bytes": sizes,
        "full_bytes": new.model_bytes,
        "ratio": round(new.model_bytes / sizes["gap_ulp"], 1),
        "ratio_classes": round(new.model_bytes / sizes["class_ulp"], 1),
        "bits_per_change": round(8 * sizes["gap_ulp"] / changed, 2),
        "bits_per_change_classes": round(8 * sizes["class_ulp"] / changed, 2),
        "gain_vs_best_peer": round(_best_peer(sizes) / sizes["gap_ulp"], 2),
        "gain_vs_best_peer_classes": round(_best_peer(sizes) / sizes["class_ulp"], 2),
        **speeds(base, new, gaps, classes),
    }
    print(f"weight_codec: {found}", file=sys.stderr, flush=True)
    return found


def speeds(base: HostState, new: HostState, gaps: Encoded, classes: Encoded) -> dict[str, float]:
    """Bytes of model a second, in gigabytes; the best of several rounds."""
    size_gb = new.model_bytes / 1e9
    receiver = HostState.allocate(base.specs)
    receiver.copy_from(base)
    return {
        "encode_gb_s": round(size_gb / _best(lambda: _delta(base, new, classes=False)), 2),
        "encode_classes_gb_s": round(size_gb / _best(lambda: _delta(base, new, classes=True), rounds=1), 2),
        "apply_gb_s": round(size_gb / _applied_s(receiver, gaps), 2),
        "apply_classes_gb_s": round(size_gb / _applied_s(receiver, classes, rounds=1), 2),
        "verify_gb_s": round(size_gb / _best(receiver.recheck), 2),
    }


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cells, and what is asked of them."""
    sparse = [one for one in cells if one["changed"] < SPARSE]
    middle = [one for one in cells if 0.03 <= one["changed"] <= 0.05]
    near_1, near_5 = (min(cells, key=lambda one: abs(one["changed"] - share)) for share in (0.01, 0.05))
    return {
        "cells": list(cells),
        "threads": len(os.sched_getaffinity(0)),
        "min_gain_vs_best_peer": min((one["gain_vs_best_peer"] for one in sparse), default=None),
        "min_gain_vs_best_peer_classes": min((one["gain_vs_best_peer_classes"] for one in sparse), default=None),
        "ratio_at_1pct": near_1["ratio"],
        "ratio_classes_at_1pct": near_1["ratio_classes"],
        "changed_at_1pct": near_1["changed"],
        "bits_per_change_3to5pct": max((one["bits_per_change"] for one in middle), default=None),
        "bits_per_change_3to5pct_classes": max((one["bits_per_change_classes"] for one in middle), default=None),
        "largest_vs_anchor": max(one["bytes"]["gap_ulp"] / one["bytes"]["anchor"] for one in cells),
        "changed_at_5pct": near_5["changed"],
        **{f"{key}_gb_s": near_1[f"{key}_gb_s"] for key in ("encode", "apply", "verify")},
        **{f"{key}_5pct_gb_s": near_5[f"{key}_gb_s"] for key in ("encode", "apply")},
    }


def _delta(base: HostState, new: HostState, *, classes: bool) -> Encoded:
    return encode_delta(base, new, version=_NEW, base_version=_OLD, classes=classes)


def _best_peer(sizes: dict[str, int]) -> int:
    return min(sizes[name] for name in peer_weight_formats.FORMATS)


def _best(work: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Seconds, of the fastest round; one more, which is not counted, compiles and warms up."""
    work()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _applied_s(receiver: HostState, encoded: Encoded, rounds: int = _ROUNDS) -> float:
    payload, times = encoded.payload(), []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        undo = apply(receiver, encoded.manifest, payload, keep_undo=True)
        times.append(time.perf_counter() - began)
        undo.roll_back()
    return min(times[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
