"""Bytes of weights by link: who was sent how much, and who sent how much."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily

from forebay.wire.v1 import common_pb2

_SHARED = {common_pb2.ROLE_SAMPLER: "samplers", common_pb2.ROLE_LEARNER: "learner"}


class WeightTraffic:
    """Counts since the start. Edges are links of their own; samplers, of which there are many, share one."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}  #: (link, "sent" or "received") -> bytes

    def sent(self, link: str, count: int) -> None:
        """So many bytes went out."""
        self._count((link, "sent"), count)

    def received(self, link: str, count: int) -> None:
        """So many bytes came in."""
        self._count((link, "received"), count)

    def _count(self, key: tuple[str, str], count: int) -> None:
        self.counts[key] = self.counts.get(key, 0) + count


def link_of(member: common_pb2.Member) -> str:
    """The link that a member's bytes are counted under."""
    if member.role == common_pb2.ROLE_EDGE:
        return member.id
    return _SHARED.get(member.role, "others")


def traffic_family(counts: dict[str, WeightTraffic]) -> CounterMetricFamily:
    """`forebay_weight_bytes_total` of some runs, by run."""
    family = CounterMetricFamily("forebay_weight_bytes", "Bytes of weights moved", labels=("run", "link", "direction"))
    for run, traffic in counts.items():
        for (link, direction), count in sorted(traffic.counts.items()):
            family.add_metric((run, link, direction), count)
    return family
