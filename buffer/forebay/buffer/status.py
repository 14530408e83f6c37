"""One coherent look at the run: who does what, what is in the reservoir, and the one thing that limits it now."""

from __future__ import annotations

from forebay.buffer import admission
from forebay.buffer.evals import final_missing
from forebay.buffer.ledger import MemberKey, MemberRecord
from forebay.buffer.reservoir import Reservoir
from forebay.wire.v1 import common_pb2, control_pb2


def status_of(reservoir: Reservoir) -> control_pb2.StatusResponse:
    """Everything `forebay status` shows, at one instant."""
    state = reservoir.state
    newest = state.newest
    answer = control_pb2.StatusResponse(
        run=reservoir.rules.run,
        state=_state(reservoir),
        limited_by=limited_by(reservoir),
        members=[_member(reservoir, key, record) for key, record in _shown(reservoir)],
        step=state.committed,
        steps=reservoir.rules.steps,
        groups_ready=len(state.buffered),
        groups_leased=len(state.leased),
        permits_outstanding=len(state.permits),
        groups_capacity=admission.grantable(state, reservoir.rules),
        learner_metrics_json=state.steps[state.committed].metrics_json if state.committed in state.steps else "",
        evals=evals_of(reservoir),
        run_json=state.run_json,
        dropped=_dropped(reservoir),
        weight_bytes_published=sum(entry.payload_bytes for entry in state.published.values()),
        weight_bytes_full=sum(entry.model_bytes for entry in state.published.values()),
    )
    if newest is not None:
        answer.newest.CopyFrom(newest.to_proto())
        answer.newest_digest = state.published[newest].digest
    return answer


def evals_of(reservoir: Reservoir) -> list[control_pb2.EvalResult]:
    """Evaluations of versions that are not void, the earliest first."""
    published = reservoir.state.published
    return [
        result
        for version, result in sorted(reservoir.state.evals.items())
        if version not in published or not published[version].void
    ]


def limited_by(reservoir: Reservoir) -> str:
    """What the run waits for right now, in one line."""
    state = reservoir.state
    if reservoir.finished:
        return "nothing: the run is finished"
    if state.paused:
        return f"somebody to resume the run (paused: {state.paused})"
    if reservoir.draining:
        return "members to finish what is in flight (draining)"
    return (
        _full(reservoir)
        or reservoir.store.place.trouble
        or _absent_learner(reservoir)
        or _first_weights(reservoir)
        or _slower_side(reservoir)
    )


def _full(reservoir: Reservoir) -> str:
    full = reservoir.no_room()
    return f"buffer: {full}" if full else ""


def _absent_learner(reservoir: Reservoir) -> str:
    learner, key = reservoir.state.learner, (common_pb2.ROLE_LEARNER, "")
    if reservoir.state.checkpoint >= reservoir.rules.steps:
        return _final_eval(reservoir)
    if learner is None:
        return "learner: none has joined yet"
    return {
        "live": "",
        "lost": f"learner: {learner.id} has not been heard of for {_silence(reservoir, key):.0f} s",
        "left": f"learner: {learner.id} has left",
    }[reservoir.members.state(key)]


def _first_weights(reservoir: Reservoir) -> str:
    return "" if reservoir.state.newest else "learner: to publish the first weights"


def _slower_side(reservoir: Reservoir) -> str:
    if reservoir.lease_waits is not None:
        _, cause, since = reservoir.lease_waits
        who = "" if _live_samplers(reservoir) else " (no sampler is connected)"
        return f"{cause}{who}; the learner waits since {reservoir.clock() - since:.0f} s"
    entry = reservoir.members.get((common_pb2.ROLE_LEARNER, ""))
    doing = f"{entry.doing} since {reservoir.clock() - entry.doing_since:.0f} s" if entry else "starting"
    full = admission.grantable(reservoir.state, reservoir.rules) == len(reservoir.state.permits)
    ready = f"; {len(reservoir.state.buffered)} groups are ready" + (", the reservoir is full" if full else "")
    return f"learner: {doing}{ready}"


def _final_eval(reservoir: Reservoir) -> str:
    waits = final_missing(reservoir.state, reservoir.rules)
    who = "a sampler" if _live_samplers(reservoir) else "a sampler to connect and"
    return f"samplers: {who} to evaluate step {reservoir.rules.steps}" if waits else ""


def _live_samplers(reservoir: Reservoir) -> int:
    return sum(
        1
        for key in reservoir.state.members
        if key[0] == common_pb2.ROLE_SAMPLER and reservoir.members.state(key) == "live"
    )


def _state(reservoir: Reservoir) -> str:
    if reservoir.finished:
        return "finished"
    if reservoir.draining:
        return "draining"
    return "paused" if reservoir.state.paused else "running"


def _shown(reservoir: Reservoir) -> list[tuple[MemberKey, MemberRecord]]:
    return sorted(reservoir.state.members.items())


def _member(reservoir: Reservoir, key: MemberKey, record: MemberRecord) -> control_pb2.MemberStatus:
    entry = reservoir.members.get(key)
    shown = control_pb2.MemberStatus(
        member=common_pb2.Member(role=_ROLES[key[0]], id=record.id, incarnation=record.incarnation),
        fleet=record.fleet,
        region=record.region,
        state=reservoir.members.state(key),
        groups=record.groups,
        tokens=record.tokens,
    )
    if entry is not None:
        shown.doing, shown.seen_s = entry.doing, _silence(reservoir, key)
        shown.since_s = reservoir.clock() - entry.doing_since
        shown.digest = entry.digest
        shown.gauges.update(entry.gauges)
        if entry.version is not None:
            shown.version.CopyFrom(entry.version.to_proto())
    return shown


_ROLES: dict[int, common_pb2.Role.ValueType] = {
    common_pb2.ROLE_SAMPLER: common_pb2.ROLE_SAMPLER,
    common_pb2.ROLE_LEARNER: common_pb2.ROLE_LEARNER,
    common_pb2.ROLE_EDGE: common_pb2.ROLE_EDGE,
}


def _silence(reservoir: Reservoir, key: MemberKey) -> float:
    entry = reservoir.members.get(key)
    return reservoir.clock() - entry.seen if entry else 0.0


def _dropped(reservoir: Reservoir) -> dict[str, int]:
    dropped: dict[str, int] = {}
    for tally in reservoir.state.tallies.values():
        for reason, counts in tally.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + counts.groups
    for (_, reason), groups in reservoir.state.refunds.items():
        dropped[reason] = dropped.get(reason, 0) + groups
    return dropped
