"""The buffer for callers without an event loop: the learner and the command line."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from forebay.buffer.answers import WHOLE, EncodedWeights, Ended, Lease, Membership, Part, Trained, Waiting
from forebay.buffer.async_client import BufferClient
from forebay.wire.trajectory import Trajectory
from forebay.wire.v1 import common_pb2, control_pb2, experience_pb2, weights_pb2
from forebay.wire.version import Version

A = TypeVar("A")


class BlockingClient:
    """BufferClient's methods, each returning when it is done. May be used from several threads."""

    def __init__(
        self,
        address: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_trouble: Callable[[str], None] | None = None,
        run: str = "",
        in_a_hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="buffer-client", daemon=True)
        self._thread.start()
        self._client = self._run(_make(address, clock=clock, on_trouble=on_trouble, run=run, in_a_hurry=in_a_hurry))

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up and end the thread."""
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def member(self) -> common_pb2.Member:
        """See BufferClient."""
        return self._client.member

    def join(self, role: str, id: str, fleet: str, region: str, run_json: str) -> Membership:
        """See BufferClient."""
        return self._run(self._client.join(role, id, fleet, region, run_json))

    def heartbeat(
        self, doing: str, since_s: float, version: Version | None, digest: bytes, gauges: Mapping[str, float]
    ) -> control_pb2.HeartbeatResponse:
        """See BufferClient."""
        return self._run(self._client.heartbeat(doing, since_s, version, digest, gauges))

    def leave(self, reason: str) -> None:
        """See BufferClient."""
        self._run(self._client.leave(reason))

    def admit(self, groups: int, held: Version | None, wait_s: float) -> experience_pb2.AdmitResponse:
        """See BufferClient."""
        return self._run(self._client.admit(groups, held, wait_s))

    def append(self, frame_builder: Callable[[int], experience_pb2.Frame]) -> None:
        """See BufferClient."""
        self._run(self._client.append(frame_builder))

    def push(
        self,
        trajectories: Sequence[Trajectory],
        permits: Sequence[experience_pb2.Permit],
        *,
        codec: str = "zstd+exact",
    ) -> None:
        """See BufferClient."""
        self._run(self._client.push(trajectories, permits, codec=codec))

    def refund(self, refunds: Sequence[experience_pb2.Refund]) -> None:
        """See BufferClient."""
        self._run(self._client.refund(refunds))

    def speak_for(self, member: common_pb2.Member) -> None:
        """See BufferClient."""
        self._client.speak_for(member)

    def lease(
        self, step: int, wait_s: float, trained: Trained | None = None, part: Part = WHOLE
    ) -> Lease | Waiting | Ended:
        """See BufferClient."""
        return self._run(self._client.lease(step, wait_s, trained, part))

    def reject(self, lease: Lease, group_ids: Sequence[int], reason: str) -> None:
        """See BufferClient."""
        self._run(self._client.reject(lease, group_ids, reason))

    def commit(self, step: int, checkpoint_step: int, metrics: Mapping[str, Any], attempt: int = 0) -> None:
        """See BufferClient."""
        self._run(self._client.commit(step, checkpoint_step, metrics, attempt))

    def rewind(self, checkpoint_step: int) -> int:
        """See BufferClient."""
        return self._run(self._client.rewind(checkpoint_step))

    def ledger(self) -> experience_pb2.LedgerResponse:
        """See BufferClient."""
        return self._run(self._client.ledger())

    def publish(self, encoded: EncodedWeights) -> int:
        """See BufferClient."""
        return self._run(self._client.publish(encoded))

    @property
    def anchor_wanted(self) -> bool:
        """See BufferClient."""
        return self._client.anchor_wanted

    def watch(self) -> Iterator[weights_pb2.Announcement]:
        """See BufferClient."""
        announcements = self._client.watch()
        while True:
            yield self._run(_next(announcements))

    def plan(self, held: Version | None, held_digest: bytes) -> weights_pb2.PlanResponse:
        """See BufferClient."""
        return self._run(self._client.plan(held, held_digest))

    def fetch(self, manifest: weights_pb2.Manifest) -> bytes:
        """See BufferClient."""
        return self._run(self._client.fetch(manifest))

    def status(self) -> control_pb2.StatusResponse:
        """See BufferClient."""
        return self._run(self._client.status())

    def history(self) -> control_pb2.HistoryResponse:
        """See BufferClient."""
        return self._run(self._client.history())

    def report_eval(self, result: control_pb2.EvalResult) -> None:
        """See BufferClient."""
        self._run(self._client.report_eval(result))

    def pause(self, reason: str) -> None:
        """See BufferClient."""
        self._run(self._client.pause(reason))

    def resume(self) -> None:
        """See BufferClient."""
        self._run(self._client.resume())

    def drain(self) -> None:
        """See BufferClient."""
        self._run(self._client.drain())

    def _run(self, work: Coroutine[Any, Any, A]) -> A:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise


async def _make(address: str, **settings: Any) -> BufferClient:
    """In the event loop, as gRPC wants it."""
    return BufferClient(address, **settings)


async def _next(announcements: Any) -> weights_pb2.Announcement:
    announcement: weights_pb2.Announcement = await anext(announcements)
    return announcement
