"""Finished groups into frames, frames into the buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forebay.buffer.client import BufferClient
from forebay.config.models import RunFile
from forebay.wire.errors import FrameError
from forebay.wire.experience import encode_frame
from forebay.wire.trajectory import Trajectory
from forebay.wire.v1 import common_pb2, experience_pb2

#: A frame is closed at this many tokens: well below the frame cap at the width of raw columns.
_FULL_TOKENS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parcel:
    """A group on its way."""

    permit: experience_pb2.Permit
    group: Sequence[Trajectory]
    stored: asyncio.Future[None]


@dataclass(slots=True)
class _Open:
    """A frame that still takes groups."""

    parcels: list[_Parcel] = field(default_factory=list)
    tokens: int = 0
    full: asyncio.Event = field(default_factory=asyncio.Event)


class Shipper:
    """Groups that finish within `frame_linger_s` of each other share a frame."""

    def __init__(self, run: RunFile, client: BufferClient, member: common_pb2.Member) -> None:
        self._run, self._client, self._member = run, client, member
        self._open: _Open | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def ship(self, permit: experience_pb2.Permit, group: Sequence[Trajectory]) -> None:
        """Return when the buffer's journal holds the group. Raises FrameRefused, FrameError, Fenced."""
        frame = self._open
        if frame is None:
            frame = self._open = _Open()
            sending = asyncio.create_task(self._close_and_send(frame))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        parcel = _Parcel(permit=permit, group=group, stored=asyncio.get_running_loop().create_future())
        frame.parcels.append(parcel)
        frame.tokens += sum(len(trajectory.tokens) + len(trajectory.prompt_tokens) for trajectory in group)
        if frame.tokens >= _FULL_TOKENS:
            self._close(frame)
        await parcel.stored

    async def _close_and_send(self, frame: _Open) -> None:
        try:
            async with asyncio.timeout(self._run.sampler.frame_linger_s):
                await frame.full.wait()
        except TimeoutError:
            self._close(frame)
        try:
            await self._send(frame.parcels)
        except FrameError:  # one group spoils the frame: only that one must fail
            for parcel in frame.parcels:
                await self._send_alone(parcel)
        except Exception as error:
            for parcel in frame.parcels:
                _settle(parcel, error)

    async def _send_alone(self, parcel: _Parcel) -> None:
        try:
            await self._send([parcel])
        except Exception as error:
            _settle(parcel, error)

    async def _send(self, parcels: Sequence[_Parcel]) -> None:
        await self._client.append(lambda sequence: self._encode(parcels, sequence))
        for parcel in parcels:
            _settle(parcel, None)

    def _close(self, frame: _Open) -> None:
        frame.full.set()
        if self._open is frame:
            self._open = None

    def _encode(self, parcels: Sequence[_Parcel], sequence: int) -> experience_pb2.Frame:
        frame = encode_frame(
            [trajectory for parcel in parcels for trajectory in parcel.group],
            run=self._run.run.name,
            sampler=self._member.id,
            fleet=self._run.sampler.fleet,
            region=self._run.sampler.region,
            incarnation=self._member.incarnation,
            sequence=sequence,
            codec=f"zstd+{self._run.sampler.logprobs}",
            attempts={parcel.permit.group_id: parcel.permit.attempt for parcel in parcels},
        )
        for header, parcel in zip(frame.header.groups, parcels, strict=True):
            header.priority = priority_of(parcel.group)
        return frame


def priority_of(group: Sequence[Trajectory]) -> float:
    """What the priority selector goes by: how far apart the rewards are (their standard deviation)."""
    return float(np.std([member.reward for member in group]))


def _settle(parcel: _Parcel, error: Exception | None) -> None:
    if parcel.stored.done():  # its group was cancelled
        return
    if error is None:
        parcel.stored.set_result(None)
    else:
        parcel.stored.set_exception(error)
