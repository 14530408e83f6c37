"""Keeps restarts short and the journal's folder small while the buffer serves."""

from __future__ import annotations

import asyncio
import logging
import sys

from forebay.buffer import snapshots
from forebay.buffer.reservoir import Reservoir

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 600.0


class Snapshotter:
    """After every sealed segment a snapshot, made by another process; then the segments that nobody needs go."""

    def __init__(self, reservoir: Reservoir) -> None:
        self._reservoir, self._folder = reservoir, reservoir.journal.folder

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            sealed = self._reservoir.journal.sealed_segment
            if sealed > max(snapshots.numbers(self._folder), default=0) and await self._make(sealed):
                await asyncio.to_thread(self._reservoir.journal.drop, self._first_needed())
            elif sealed == self._reservoir.journal.sealed_segment:
                await self._reservoir.sealed.wait(_LOOK_AGAIN_S)

    async def _make(self, segment: int) -> bool:
        retain_bytes = int(self._reservoir.run.buffer.retain_gb * 1e9)
        words = (sys.executable, "-m", snapshots.__name__, self._folder, segment, retain_bytes)
        maker = await asyncio.create_subprocess_exec(*map(str, words), stderr=asyncio.subprocess.PIPE)
        try:
            _, said = await maker.communicate()
        finally:
            if maker.returncode is None:
                maker.kill()
                await maker.wait()
        if maker.returncode:
            why = said.decode(errors="replace").strip().splitlines()[-1:]
            log.error("no snapshot of segment %d: %s; a restart will read more of the journal", segment, *why)
            await asyncio.sleep(_LOOK_AGAIN_S)
        return maker.returncode == 0

    def _first_needed(self) -> int:
        """The oldest segment that a restart from the older snapshot, a learner or a replay may read."""
        kept = snapshots.numbers(self._folder)
        if len(kept) < snapshots.KEPT:
            return 0
        frames = self._reservoir.state.frames
        live = next(iter(frames.values())).position.segment if frames else kept[0] + 1
        return min(kept[0] + 1, live, self._reservoir.retention.first_segment or live)
