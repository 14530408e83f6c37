"""The buffer's Prometheus metrics, computed from one status when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from forebay.buffer.server import BufferServer
from forebay.buffer.status import status_of
from forebay.wire.v1 import control_pb2


class BufferMetrics:
    """A collector over a running server. Labels are few: state, reason, role."""

    def __init__(self, server: BufferServer) -> None:
        self._server = server
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at every scrape."""
        reservoir, status = self._server.reservoir, status_of(self._server.reservoir)
        yield GaugeMetricFamily("forebay_step", "Newest committed step", status.step)
        yield GaugeMetricFamily("forebay_steps_wanted", "Steps of the run", status.steps)
        yield GaugeMetricFamily("forebay_weights_step", "Step of the newest published version", status.newest.step)
        yield _groups(status)
        yield GaugeMetricFamily("forebay_groups_capacity", "Groups that may be in flight now", status.groups_capacity)
        yield _dropped(status)
        yield _members(status)
        yield CounterMetricFamily(
            "forebay_weights_published_bytes", "Bytes of published payloads", status.weight_bytes_published
        )
        yield CounterMetricFamily(
            "forebay_weights_full_bytes", "Bytes had every version been sent whole", status.weight_bytes_full
        )
        yield CounterMetricFamily(
            "forebay_generated_tokens", "Tokens accepted", sum(member.tokens for member in status.members)
        )
        yield GaugeMetricFamily("forebay_buffer_disk_bytes", "Journal and weights on disk", reservoir.disk_bytes)
        yield GaugeMetricFamily(
            "forebay_buffer_pending_bytes", "Frames that wait for the disk", reservoir.journal.pending_bytes
        )
        yield GaugeMetricFamily(
            "forebay_buffer_loop_lag_seconds", "How late the event loop wakes", self._server.loop_lag_s
        )
        yield GaugeMetricFamily("forebay_buffer_time_seconds", "The buffer's clock", time.time())


def _groups(status: control_pb2.StatusResponse) -> Metric:
    groups = GaugeMetricFamily("forebay_groups", "Groups by where they are", labels=["state"])
    groups.add_metric(["ready"], status.groups_ready)
    groups.add_metric(["leased"], status.groups_leased)
    groups.add_metric(["in_flight"], status.permits_outstanding)
    return groups


def _dropped(status: control_pb2.StatusResponse) -> Metric:
    dropped = CounterMetricFamily("forebay_groups_dropped", "Groups that were not trained", labels=["reason"])
    for reason, groups in status.dropped.items():
        dropped.add_metric([reason], groups)
    return dropped


def _members(status: control_pb2.StatusResponse) -> Metric:
    members = GaugeMetricFamily("forebay_members", "Members by role and state", labels=["role", "state"])
    names = {1: "sampler", 2: "learner", 3: "edge"}
    counts: dict[tuple[str, str], int] = {}
    for member in status.members:
        key = (names.get(member.member.role, "unknown"), member.state)
        counts[key] = counts.get(key, 0) + 1
    for key, count in sorted(counts.items()):
        members.add_metric(list(key), count)
    return members
