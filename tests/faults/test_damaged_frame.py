"""A bit of a sealed segment flips while the buffer serves: one batch is affected, and said by name; the run goes on."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest

from forebay.buffer.client import BufferClient, Lease, Refused
from forebay.buffer.conservation import imbalances
from forebay.buffer.records import Position, segment_path
from forebay.wire.version import Version
from tests.buffer.conftest import Serve, Served
from tests.buffer.support import join_learner, join_sampler
from tests.faults.test_network import appending

V0 = Version(1, 0)
FRAME_BYTES = 400_000  #: two fill a segment of 1 MiB
LEARNERS = 2


def flip_a_bit(path: Path, position: Position) -> None:
    """In the middle of a payload, behind the server's back."""
    fd = os.open(path, os.O_RDWR)
    try:
        middle = position.payload_offset + position.payload_bytes // 2
        [byte] = os.pread(fd, 1, middle)
        os.pwrite(fd, bytes([byte ^ 0x10]), middle)
    finally:
        os.close(fd)


async def lease(client: BufferClient, step: int) -> Lease:
    leased = await client.lease(step, 5.0)
    assert isinstance(leased, Lease)
    return leased


async def try_damaged_batch(served: Served, said: str) -> None:
    """Learners in a row, all that the batch is offered to, are told what is damaged and where."""
    for _ in range(LEARNERS):
        async with served.client() as learner:
            await join_learner(learner, served.run)
            with pytest.raises(Refused, match=said):
                await learner.lease(2, 5.0)


async def test_a_flipped_bit_in_a_sealed_segment(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Row 8: batches before and behind it are whole; its own is no learner's death but a dead letter in the end."""
    settings: dict[str, Any] = {"buffer": {"segment_mb": 1}, "max_staleness": 3, "max_attempts": LEARNERS}
    async with serve(**settings) as served:
        async with served.client() as learner, served.client() as sampler:
            await join_learner(learner, served.run)
            await join_sampler(sampler, served.run)
            permits = list((await sampler.admit(6, V0, 1.0)).permits)
            await asyncio.gather(*appending(sampler, permits, FRAME_BYTES))
            state, journal = served.reservoir.state, served.reservoir.journal
            position = state.frames[state.groups[2].lsn].position
            assert position.segment <= journal.sealed_segment
            path = segment_path(journal.folder, position.segment)
            flip_a_bit(path, position)
            assert (await lease(learner, 1)).group_ids == (0, 1)
            await learner.commit(1, 1, {})
        place = rf"{path}: the record at offset {position.offset} \(LSN {position.lsn}\)"
        await try_damaged_batch(served, place)
        alarms = [record for record in caplog.records if re.search(place, record.message)]
        assert [record.levelname for record in alarms] == ["ERROR"] * LEARNERS
        async with served.client() as learner:
            await join_learner(learner, served.run)
            assert (await lease(learner, 2)).group_ids == (4, 5)
            await learner.commit(2, 2, {})
            ledger = await learner.ledger()
        assert {row.state: row.groups for row in ledger.rows if row.groups} == {
            "produced": 6,
            "trained": 4,
            "dropped:dead_letter": 2,
        }
        assert imbalances(ledger) == []
    async with serve(**settings) as served:
        assert served.reservoir.state.committed == 2
