"""Who may start which group: pure functions of the State."""

from __future__ import annotations

from forebay.buffer.ledger import MemberKey, State
from forebay.buffer.rules import Rules
from forebay.wire.v1 import experience_pb2
from forebay.wire.version import Version


def permits_for(state: State, rules: Rules, held: Version | None, wanted: int) -> list[experience_pb2.Permit]:
    """Permits for a sampler that generates with `held`: groups of lost holders first, then new ones.

    The n-th group started is granted only if it can be trained within the staleness bound by whoever holds `held`:
    n <= B · (min(newest, held) + max_staleness + 1), and only if the run still needs it.
    """
    limit = _limit(state, rules, held)
    if limit is None:
        return []
    permits = []
    if state.started <= limit:
        permits = [
            experience_pb2.Permit(group_id=group_id, attempt=state.again[group_id] + 1)
            for group_id in sorted(state.again)[:wanted]
        ]
    fresh = min(wanted - len(permits), limit - state.started, _prompts_left(state, rules))
    first = state.next_group
    return permits + [experience_pb2.Permit(group_id=first + i, attempt=1) for i in range(max(0, fresh))]


def why_none(state: State, rules: Rules, held: Version | None) -> str:
    """What a sampler waits for that was granted nothing."""
    newest = state.newest
    if newest is None:
        return "learner to publish the first weights"
    if held is None or _is_void(state, held) or rules.capacity(held.step) < rules.capacity(newest.step):
        return f"this sampler to install version {newest}"
    if not _prompts_left(state, rules):
        return f"nothing: the prompts are used up; the learner has done step {state.committed}"
    if state.started >= rules.groups_wanted:
        return f"nothing: all groups are started; the learner has done step {state.committed} of {rules.steps}"
    return f"learner to publish step {_step_that_frees(state, rules)}"


def held_by(state: State, key: MemberKey, before: int | None = None) -> list[experience_pb2.Permit]:
    """Permits in the hands of a member; with `before`, only those of incarnations below it."""
    return [
        experience_pb2.Permit(group_id=group_id, attempt=permit.attempt)
        for group_id, permit in state.permits.items()
        if permit.holder == key and (before is None or permit.incarnation < before)
    ]


def grantable(state: State, rules: Rules) -> int:
    """Groups that samplers with the newest weights can be working on right now, those in flight included."""
    limit = _limit(state, rules, state.newest)
    room = 0 if limit is None else max(0, limit - state.started)
    return room + len(state.again) + len(state.permits)


def exhausted(state: State, rules: Rules) -> bool:
    """Whether the data has ended: every prompt was used as often as it may be, and what is left makes no batch."""
    if rules.groups_of_data is None or state.next_group < rules.groups_of_data:
        return False
    next_batch = state.batches.get(state.committed + 1)
    in_flight = len(state.permits) + len(state.again)
    return next_batch is None and not in_flight and len(state.buffered) < rules.groups_per_step


def last_step(state: State, rules: Rules) -> int:
    """The step after which the run is over."""
    return state.committed if exhausted(state, rules) else rules.steps


def _prompts_left(state: State, rules: Rules) -> int:
    return rules.groups_of_data - state.next_group if rules.groups_of_data is not None else rules.groups_wanted


def _limit(state: State, rules: Rules, held: Version | None) -> int | None:
    newest = state.newest
    if newest is None or held is None or held not in state.published or _is_void(state, held):
        return None
    return rules.capacity(min(newest.step, held.step))


def _is_void(state: State, version: Version) -> bool:
    return version in state.published and state.published[version].void


def _step_that_frees(state: State, rules: Rules) -> int:
    needed = -(-(state.started + 1) // rules.groups_per_step) - rules.max_staleness - 1
    every = rules.publish_every_steps
    return min(-(-max(needed, 1) // every) * every, rules.steps)
