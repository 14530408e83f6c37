"""What goes into a frame comes out of it, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from forebay.wire import bounded_zstd
from forebay.wire.experience import (
    FrameError,
    check_frame,
    decode_frame,
    encode_frame,
    from_record_batch,
    to_record_batch,
)
from forebay.wire.frame_header import MAX_FRAME_BYTES
from forebay.wire.logprobs import COMPACT_BOUND
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version
from tests.wire.making import NEW, OLD, SENDER, content_of, facts, frame_of, resealed, trajectory

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_U32 = st.integers(0, 2**32 - 1)
_TOKENS = st.one_of(st.integers(0, 200), st.integers(0, 150_000), st.integers(0, 2**31 - 1))


@st.composite
def _spans(draw: st.DrawFn, length: int) -> tuple[VersionSpan, ...]:
    starts = sorted({0, *draw(st.lists(st.integers(0, length - 1), max_size=3))})
    return tuple(VersionSpan(start=start, version=Version(draw(_U32), draw(_U32))) for start in starts)


@st.composite
def _members(draw: st.DrawFn, group_id: int) -> list[Trajectory]:
    prompt = draw(arrays(np.int32, st.integers(0, 8), elements=_TOKENS))
    start = draw(arrays(np.int32, st.integers(0, 6), elements=_TOKENS))
    return [draw(_member(group_id, member, prompt, start)) for member in draw(st.sets(_U32, min_size=1, max_size=4))]


@st.composite
def _member(draw: st.DrawFn, group_id: int, member: int, prompt: Any, start: Any) -> Trajectory:
    tokens = np.concatenate([start, draw(arrays(np.int32, st.integers(1, 6), elements=_TOKENS))])
    length, number = len(tokens), st.floats(width=64)
    return Trajectory(
        group_id=group_id,
        member=member,
        prompt_tokens=prompt,
        tokens=tokens,
        loss_mask=draw(arrays(np.bool_, length)),
        logprobs=draw(arrays(np.uint32, length, elements=_U32)).view(np.float32),
        spans=draw(_spans(length)),
        temperature=draw(number),
        top_p=draw(number),
        reward=draw(number),
        reward_parts=draw(st.dictionaries(_TEXT, number, max_size=3)),
        finish_reason=draw(_TEXT),
        generated_s=draw(number),
        scored_s=draw(number),
        trace=draw(_TEXT),
        metadata=draw(_TEXT),
    )


@st.composite
def _groups(draw: st.DrawFn) -> list[Trajectory]:
    ids = draw(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4, unique=True))
    return [member for group_id in ids for member in draw(_members(group_id))]


@settings(max_examples=120, deadline=None)
@given(_groups())
def test_exact_frames_keep_every_bit(trajectories: list[Trajectory]) -> None:
    frame = experience_pb2.Frame.FromString(frame_of(trajectories).SerializeToString())
    check_frame(frame)
    assert [facts(back) for back in decode_frame(frame)] == [facts(member) for member in trajectories]


@settings(max_examples=50, deadline=None)
@given(_groups())
def test_rows_keep_every_bit(trajectories: list[Trajectory]) -> None:
    batch = to_record_batch(trajectories, frame_of(trajectories).header)
    assert [facts(back) for back in from_record_batch(batch)] == [facts(member) for member in trajectories]
    assert batch.schema.metadata == {b"forebay.schema_version": b"1"}
    assert batch.column("sampler").to_pylist() == ["s0"] * len(trajectories)


def test_rows_keep_signalling_nans() -> None:
    """Widening such a NaN to 64 bits would change it."""
    sent = trajectory(logprobs=np.array([0x7F800001, 0xFF800001, 0x7FC00001, 0x80000000], np.uint32).view(np.float32))
    (back,) = from_record_batch(to_record_batch([sent], frame_of([sent]).header))
    assert facts(back) == facts(sent)
    assert from_record_batch(to_record_batch([], frame_of([sent]).header)) == []


def test_rows_of_another_schema_are_refused() -> None:
    batch = to_record_batch([trajectory()], frame_of([trajectory()]).header)
    with pytest.raises(FrameError, match="schema"):
        from_record_batch(batch.replace_schema_metadata({"forebay.schema_version": "2"}))


@settings(max_examples=100, deadline=None)
@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(-65536, 65536, width=32)))
def test_compact_log_probabilities_keep_their_bound(logprobs: Any) -> None:
    sent = trajectory(tokens=np.zeros(len(logprobs), np.int32), logprobs=logprobs)
    (back,) = decode_frame(frame_of([sent], codec="zstd+compact"))
    assert np.abs(back.logprobs.astype(np.float64) - logprobs).max() <= COMPACT_BOUND == 2**-8


def test_header_tells_what_the_buffer_must_know() -> None:
    spans = (VersionSpan(start=0, version=OLD), VersionSpan(start=2, version=NEW))
    members = [trajectory(group_id=9, member=m, spans=spans[: 1 + m]) for m in range(2)]
    frame = frame_of([*members, trajectory(group_id=3)], attempts={9: 2, 3: 1})
    first, second = frame.header.groups
    assert (first.group_id, first.attempt, first.members) == (9, 2, 2)
    assert (first.prompt_tokens, first.generated_tokens) == (3, 8)
    assert (Version.from_proto(first.oldest), Version.from_proto(first.newest)) == (OLD, NEW)
    assert (second.group_id, second.attempt) == (3, 1)
    assert (frame.header.sampler, frame.header.incarnation, frame.header.sequence) == ("s0", 2, 7)


def test_members_of_a_group_may_come_apart() -> None:
    mixed = [trajectory(group_id=2), trajectory(group_id=1), trajectory(group_id=2, member=1)]
    back = decode_frame(frame_of(mixed))
    assert [(member.group_id, member.member) for member in back] == [(2, 0), (2, 1), (1, 0)]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([trajectory(tokens=np.zeros(0, np.int32), spans=())], "no generated tokens"),
        ([trajectory(logprobs=np.zeros(3, np.float32))], "log-probabilities"),
        ([trajectory(loss_mask=np.ones(5, np.bool_))], "mask"),
        ([trajectory(spans=())], "spans"),
        ([trajectory(spans=(VersionSpan(start=1, version=OLD),))], "spans"),
        ([trajectory(spans=(VersionSpan(start=0, version=OLD), VersionSpan(start=4, version=NEW)))], "spans"),
        ([trajectory(), trajectory()], "member twice"),
        ([trajectory(), trajectory(member=1, prompt_tokens=np.array([5], np.int32))], "different prompts"),
        ([trajectory(member=-1)], "does not fit"),
        ([trajectory(metadata="\ud800")], "cannot hold"),
        ([], "0 groups|need at least one"),
    ],
)
def test_what_must_not_travel_is_refused(broken: list[Trajectory], message: str) -> None:
    with pytest.raises(FrameError, match=message):
        frame_of(broken)


def test_a_group_without_permit_is_refused() -> None:
    with pytest.raises(FrameError, match="no permit"):
        encode_frame([trajectory()], attempts={}, **SENDER)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(FrameError, match="expected one of"):
        frame_of([trajectory()], codec="zstd+guess")


def test_compact_refuses_what_it_cannot_bound() -> None:
    with pytest.raises(FrameError, match="exact codec"):
        frame_of([trajectory(logprobs=np.array([-np.inf, 0, 0, 0], np.float32))], codec="zstd+compact")


def test_frames_above_the_cap_are_refused() -> None:
    random = np.random.default_rng(0)
    length = MAX_FRAME_BYTES // 4
    logprobs = random.integers(0, 2**32, length, np.uint32).view(np.float32)
    with pytest.raises(FrameError, match="split"):
        frame_of([trajectory(tokens=np.zeros(length, np.int32), logprobs=logprobs)])


def test_equal_tokens_compress_without_end_and_are_still_welcome() -> None:
    length = 200_000
    sent = trajectory(tokens=np.zeros(length, np.int32), logprobs=np.zeros(length, np.float32))
    frame = frame_of([sent])
    assert frame.header.uncompressed_bytes > 200 * frame.header.payload_bytes
    assert facts(decode_frame(frame)[0]) == facts(sent)


def test_the_columns_compress_better_than_plain_ones() -> None:
    random = np.random.default_rng(1)
    prompt = random.integers(0, 49_152, 512).astype(np.int32)
    members = []
    for member in range(16):
        tokens = np.minimum(random.zipf(1.2, 900), 49_151).astype(np.int32)
        logprobs = -random.exponential(0.7, 900).astype(np.float32)
        members.append(trajectory(member=member, prompt_tokens=prompt, tokens=tokens, logprobs=logprobs))
    plain = to_record_batch(members, frame_of(members).header).serialize().to_pybytes()
    plain_bytes = len(bounded_zstd.compress(plain, 3))
    assert frame_of(members, "zstd+exact").ByteSize() < 0.98 * plain_bytes
    assert frame_of(members, "zstd+compact").ByteSize() < 0.55 * plain_bytes


def test_content_survives_being_sealed_again() -> None:
    frame = frame_of([trajectory()])
    assert facts(decode_frame(resealed(frame, content_of(frame)))[0]) == facts(trajectory())
