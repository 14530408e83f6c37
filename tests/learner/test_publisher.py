"""Publishing: base, deltas, anchors, failures, and never a queue."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.learner.errors import LearnerError
from forebay.learner.publisher import Publisher
from forebay.wire.weights import HostState, TensorSpec
from tests.learner.fake_buffer import FakeBuffer

SPECS = [TensorSpec(name="w", dtype="BF16", shape=(64, 32)), TensorSpec(name="b", dtype="BF16", shape=(32,))]


def fill(value: int):
    """Writes weights that differ a little from `value - 1`'s."""

    def write(state: HostState) -> None:
        state.bits_of("w")[:] = np.arange(2048, dtype=np.uint16) + 0x3C00
        state.bits_of("w")[:value] += 1

    return write


def publisher(buffer: FakeBuffer, anchor_every: int = 100) -> Publisher:
    return Publisher(buffer, SPECS, incarnation=1, anchor_every=anchor_every)


def offered(publisher: Publisher, *steps: int) -> None:
    for step in steps:
        publisher.offer(step, fill(step))
        assert publisher.wait_stored(30)


def test_the_first_version_is_an_anchor_and_later_ones_are_deltas_to_what_was_stored() -> None:
    buffer = FakeBuffer(lambda step: [])
    ours = publisher(buffer)
    offered(ours, 0, 1, 2)
    assert buffer.versions == ["1.0 anchor", "1.1", "1.2"]
    expected = HostState.allocate(SPECS)
    fill(2)(expected)
    assert buffer.newest_weights().digest() == expected.digest()
    assert ours.last is not None
    assert ours.last.digest == expected.digest()
    assert ours.close(30)


def test_an_anchor_comes_every_so_many_publications() -> None:
    buffer = FakeBuffer(lambda step: [])
    offered(publisher(buffer, anchor_every=2), 0, 1, 2, 3)
    assert buffer.versions == ["1.0 anchor", "1.1", "1.2 anchor", "1.3"]


def test_after_a_failure_the_same_version_goes_out_in_full() -> None:
    buffer = FakeBuffer(lambda step: [])
    ours = publisher(buffer)
    offered(ours, 0)
    buffer.fail_publish = [True]
    offered(ours, 1, 2)
    assert buffer.versions == ["1.0 anchor", "1.1 anchor", "1.2"]


def test_a_buffer_that_never_stores_is_an_error_and_not_a_silence() -> None:
    buffer = FakeBuffer(lambda step: [])
    ours = publisher(buffer)
    buffer.fail_publish = [True] * 10
    ours.offer(0, fill(0))
    with pytest.raises(LearnerError, match="not stored"):
        ours.wait_stored(30)
    with pytest.raises(LearnerError, match="not stored"):
        ours.offer(1, fill(1))


def test_a_slow_link_skips_versions_and_the_last_is_always_sent() -> None:
    buffer = FakeBuffer(lambda step: [])
    ours = publisher(buffer)
    offered(ours, 0)
    buffer.gate.clear()
    for step in range(1, 6):
        ours.offer(step, fill(step))
    assert not ours.wait_stored(0)
    buffer.gate.set()
    assert ours.close(30)
    assert buffer.versions[-1] == "1.5"
    assert len(buffer.versions) <= 3
    expected = HostState.allocate(SPECS)
    fill(5)(expected)
    assert buffer.newest_weights().digest() == expected.digest()


def test_a_resumed_learner_builds_on_the_stored_version_when_it_is_the_same() -> None:
    buffer = FakeBuffer(lambda step: [])
    offered(publisher(buffer), 4)
    resumed = Publisher(buffer, SPECS, incarnation=2, anchor_every=100)
    state = HostState.allocate(SPECS)
    fill(4)(state)
    resumed.adopt(state, lambda room: room.copy_from(state))
    offered(resumed, 4)
    assert buffer.versions == ["1.4 anchor", "2.4"]
    assert buffer.published[-1].manifest.payload_bytes == 0

    other = Publisher(buffer, SPECS, incarnation=3, anchor_every=100)
    fill(3)(state)
    other.adopt(state, lambda room: room.copy_from(state))
    offered(other, 3)
    assert buffer.versions[-1] == "3.3 anchor"


def test_an_anchor_that_the_buffer_misses_comes_next() -> None:
    buffer = FakeBuffer(lambda step: [])
    ours = publisher(buffer)
    offered(ours, 0, 1)
    buffer.anchor_wanted = True
    offered(ours, 2)
    buffer.anchor_wanted = False
    offered(ours, 3)
    assert buffer.versions == ["1.0 anchor", "1.1", "1.2 anchor", "1.3"]
