"""The buffer's Prometheus metrics, computed from one status of each run when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from forebay.buffer.ledger import State
from forebay.buffer.reservoir import Reservoir
from forebay.buffer.server import BufferServer
from forebay.buffer.status import status_of
from forebay.buffer.tally import Counts
from forebay.buffer.weight_traffic import traffic_family
from forebay.wire.v1 import control_pb2

_ROLES = {1: "sampler", 2: "learner", 3: "edge"}

#: Name, kind, help, further labels.
_FAMILIES: Sequence[tuple[str, type[Metric], str, tuple[str, ...]]] = (
    ("forebay_step", GaugeMetricFamily, "Newest committed step", ()),
    ("forebay_steps_wanted", GaugeMetricFamily, "Steps of the run", ()),
    ("forebay_weights_step", GaugeMetricFamily, "Step of the newest published version", ()),
    ("forebay_groups", GaugeMetricFamily, "Groups by where they are", ("state",)),
    ("forebay_groups_capacity", GaugeMetricFamily, "Groups that may be in flight now", ()),
    ("forebay_groups_dropped", CounterMetricFamily, "Groups that were not trained", ("reason",)),
    ("forebay_stale_length_ratio", GaugeMetricFamily, "Tokens a trajectory dropped as stale, by those trained", ()),
    ("forebay_members", GaugeMetricFamily, "Members by role and state", ("role", "state")),
    ("forebay_weights_published_bytes", CounterMetricFamily, "Bytes of published payloads", ()),
    ("forebay_weights_full_bytes", CounterMetricFamily, "Bytes had every version been sent whole", ()),
    ("forebay_generated_tokens", CounterMetricFamily, "Tokens accepted", ()),
    ("forebay_append_streams", GaugeMetricFamily, "Append streams open", ()),
    ("forebay_buffer_disk_bytes", GaugeMetricFamily, "Journal and weights on disk", ()),
    ("forebay_buffer_kept_bytes", GaugeMetricFamily, "Of these, trained experience kept for replay", ()),
    ("forebay_buffer_pending_bytes", GaugeMetricFamily, "Frames that wait for the disk", ()),
)

_Values = dict[str, dict[tuple[str, ...], float]]


class BufferMetrics:
    """A collector over a running server. Labels are few: run, state, reason, role."""

    def __init__(self, server: BufferServer) -> None:
        self._server = server
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at every scrape."""
        values = {reservoir.rules.run: _values(reservoir) for reservoir in self._server.reservoirs}
        for name, kind, told, labels in _FAMILIES:
            family = kind(name, told, labels=("run", *labels))  # type: ignore[call-arg]
            for run, by_name in values.items():
                for key, value in sorted(by_name.get(name, {}).items()):
                    family.add_metric((run, *key), value)  # type: ignore[attr-defined]
            yield family
        yield traffic_family({tenant.reservoir.rules.run: tenant.shelf.traffic for tenant in self._server.tenants})
        yield GaugeMetricFamily(
            "forebay_buffer_loop_lag_seconds", "How late the event loop wakes", self._server.loop_lag_s
        )
        yield GaugeMetricFamily("forebay_buffer_time_seconds", "The buffer's clock", time.time())


def _values(reservoir: Reservoir) -> _Values:
    """Every metric of one run, by name and further labels."""
    status = status_of(reservoir)
    single = {
        "forebay_step": status.step,
        "forebay_steps_wanted": status.steps,
        "forebay_weights_step": status.newest.step,
        "forebay_groups_capacity": status.groups_capacity,
        "forebay_weights_published_bytes": status.weight_bytes_published,
        "forebay_weights_full_bytes": status.weight_bytes_full,
        "forebay_generated_tokens": sum(member.tokens for member in status.members),
        "forebay_append_streams": reservoir.streams,
        "forebay_buffer_disk_bytes": reservoir.disk_bytes,
        "forebay_buffer_kept_bytes": reservoir.retention.bytes,
        "forebay_buffer_pending_bytes": reservoir.journal.pending_bytes,
    }
    ratio = stale_length_ratio(reservoir.state)
    values: _Values = {name: {(): float(value)} for name, value in single.items()}
    values["forebay_groups"] = _groups(status)
    values["forebay_groups_dropped"] = {(reason,): float(groups) for reason, groups in status.dropped.items()}
    values["forebay_members"] = _members(status)
    values["forebay_stale_length_ratio"] = {} if ratio is None else {(): ratio}
    return values


def stale_length_ratio(state: State) -> float | None:
    """Mean length of trajectories dropped as stale, by that of trained ones; None while there are not both.

    Above 1 the staleness bound takes long trajectories away: the policy is then trained toward short ones.
    """
    rows = state.rows()
    stale = sum((counts for (_, _, name), counts in rows.items() if name == "dropped:stale"), Counts())
    trained = sum((counts for (_, _, name), counts in rows.items() if name == "trained"), Counts())
    if not stale.tokens or not trained.tokens:
        return None
    return (stale.tokens / stale.trajectories) / (trained.tokens / trained.trajectories)


def _groups(status: control_pb2.StatusResponse) -> dict[tuple[str, ...], float]:
    return {
        ("ready",): status.groups_ready,
        ("leased",): status.groups_leased,
        ("in_flight",): status.permits_outstanding,
    }


def _members(status: control_pb2.StatusResponse) -> dict[tuple[str, ...], float]:
    counts: dict[tuple[str, ...], float] = {}
    for member in status.members:
        key = (_ROLES.get(member.member.role, "unknown"), member.state)
        counts[key] = counts.get(key, 0) + 1
    return counts
