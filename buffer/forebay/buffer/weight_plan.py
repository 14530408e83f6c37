"""The cheapest way from the weights somebody holds to another version."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from forebay.wire.v1 import weights_pb2

#: The state digest of "nothing held": where anchors start from.
NOTHING = b""
#: A way from an anchor that costs more than this many anchors asks for a new one.
_ANCHORS_TOO_MANY = 1.5
#: One answer carries manifests of at most so many bytes; whoever takes them plans on from there.
MAX_PATH_BYTES = 4 << 20


def cheapest_path(
    manifests: Iterable[weights_pb2.Manifest], held_digest: bytes, target_digest: bytes
) -> list[weights_pb2.Manifest] | None:
    """Manifests to apply in order, fewest payload bytes in all; empty when already there, None when there is no way.

    States are nodes, named by digest; a delta leads from its base's digest to its own, an anchor from anywhere.
    """
    edges: dict[bytes, list[weights_pb2.Manifest]] = {}
    for manifest in manifests:
        edges.setdefault(NOTHING if manifest.anchor else manifest.base_digest, []).append(manifest)
    came_by: dict[bytes, weights_pb2.Manifest | None] = {}
    frontier: list[tuple[int, int, bytes, weights_pb2.Manifest | None]] = [(0, 0, held_digest, None)]
    if held_digest != NOTHING:
        frontier.append((0, 1, NOTHING, None))
    order = len(frontier)
    while frontier:
        cost, _, state, by = heapq.heappop(frontier)
        if state in came_by:
            continue
        came_by[state] = by
        if state == target_digest:
            return list(_back(came_by, state))[::-1]
        for manifest in edges.get(state, []):
            heapq.heappush(frontier, (cost + manifest.payload_bytes, order, manifest.digest, manifest))
            order += 1
    return None


def _back(came_by: dict[bytes, weights_pb2.Manifest | None], state: bytes) -> Iterator[weights_pb2.Manifest]:
    while (by := came_by[state]) is not None:
        yield by
        state = NOTHING if by.anchor else by.base_digest


def first_part(path: Sequence[weights_pb2.Manifest]) -> list[weights_pb2.Manifest]:
    """As much of a path as one answer carries; all of it, nearly always."""
    taken, held = list[weights_pb2.Manifest](), 0
    for manifest in path:
        held += manifest.ByteSize()
        if taken and held > MAX_PATH_BYTES:
            break
        taken.append(manifest)
    return taken


def wants_anchor(path: Sequence[weights_pb2.Manifest]) -> bool:
    """Whether somebody who must begin with an anchor would fare much better with a new one."""
    if not path or not path[0].anchor:
        return False
    return sum(manifest.payload_bytes for manifest in path) > _ANCHORS_TOO_MANY * path[0].payload_bytes
