"""What changed between two looks at a run, in words: members, versions held, held-out scores, states."""

from __future__ import annotations

from collections.abc import Iterator

from forebay.wire.v1 import common_pb2, control_pb2

ROLE_WORDS = {common_pb2.ROLE_SAMPLER: "sampler", common_pb2.ROLE_LEARNER: "learner", common_pb2.ROLE_EDGE: "edge"}

Status = control_pb2.StatusResponse
Member = control_pb2.MemberStatus


def changes(before: Status | None, after: Status) -> list[str]:
    """Events between two status answers, in a fixed order; at the first look, who is there."""
    earlier = before if before is not None else Status()
    return [*_member_changes(earlier, after), *_run_changes(earlier, after), *_failed_installs(earlier, after)]


def _member_changes(before: Status, after: Status) -> Iterator[str]:
    known = {_key(member): member for member in before.members}
    for member in after.members:
        name, earlier = f"{ROLE_WORDS.get(member.member.role, 'member')} {member.member.id}", known.get(_key(member))
        if earlier is None and member.state == "live":
            yield f"{name} joined from {member.fleet} in {member.region}"
        elif earlier is None or (earlier.state, earlier.member.incarnation) == (
            member.state,
            member.member.incarnation,
        ):
            continue
        elif member.state == "live":
            yield f"{name} is back (incarnation {member.member.incarnation})"
        else:
            yield f"{name} {member.state}"


def _run_changes(before: Status, after: Status) -> Iterator[str]:
    seen = len(before.evals)
    for result in after.evals[seen:]:
        yield f"held-out score at step {result.version.step}: {result.score:.3f} ± {result.stderr:.3f}"
    if before.state and after.state != before.state:
        yield f"the run is {after.state}"
    if after.newest.incarnation > before.newest.incarnation > 0:
        yield f"a new learner publishes from step {after.newest.step} on"


def _failed_installs(before: Status, after: Status) -> Iterator[str]:
    earlier = {_key(member): member.gauges.get("failed_installs", 0.0) for member in before.members}
    for member in after.members:
        failed = member.gauges.get("failed_installs", 0.0)
        if failed > earlier.get(_key(member), failed):
            yield f"sampler {member.member.id} failed to install weights and keeps serving the version before"


def _key(member: Member) -> tuple[int, str]:
    return member.member.role, member.member.id
