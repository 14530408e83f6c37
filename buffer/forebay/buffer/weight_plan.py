"""The cheapest way from the weights somebody holds to another version."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from forebay.wire.v1 import weights_pb2

#: The state digest of "nothing held": where anchors start from.
NOTHING = b""


def cheapest_path(
    manifests: Iterable[weights_pb2.Manifest], held_digest: bytes, target_digest: bytes
) -> list[weights_pb2.Manifest] | None:
    """Manifests to apply in order, fewest payload bytes in all; empty when already there, None when there is no way.

    States are nodes, named by digest; a delta leads from its base's digest to its own, an anchor from anywhere.
    """
    edges: dict[bytes, list[weights_pb2.Manifest]] = {}
    for manifest in manifests:
        edges.setdefault(NOTHING if manifest.anchor else manifest.base_digest, []).append(manifest)
    best: dict[bytes, int] = {}
    frontier: list[tuple[int, int, bytes, list[weights_pb2.Manifest]]] = [(0, 0, held_digest, [])]
    if held_digest != NOTHING:
        frontier.append((0, 1, NOTHING, []))
    order = len(frontier)
    while frontier:
        cost, _, state, path = heapq.heappop(frontier)
        if state == target_digest:
            return path
        if state in best:
            continue
        best[state] = cost
        for manifest in edges.get(state, []):
            heapq.heappush(frontier, (cost + manifest.payload_bytes, order, manifest.digest, [*path, manifest]))
            order += 1
    return None
