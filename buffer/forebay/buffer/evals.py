"""When a version is scored on the held-out prompts, and by whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.buffer.admission import last_step
from forebay.buffer.ledger import MemberKey, State
from forebay.buffer.rules import Rules
from forebay.wire.version import Version


def milestone(rules: Rules, step: int, last_step: int) -> str:
    """The evaluation that a version of `step` stands for; empty when it stands for none."""
    if not rules.heldout_prompts:
        return ""
    if step == 0:
        return "start"
    if step >= last_step:
        return "end"
    passed = step // rules.eval_every_steps if rules.eval_every_steps else 0
    return f"{passed}" if passed else ""


def final_missing(state: State, rules: Rules) -> bool:
    """Whether the run still lacks the evaluation of its last step."""
    if not rules.heldout_prompts:
        return False
    return not any(version.step >= last_step(state, rules) and not _void(state, version) for version in state.evals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Who is charged with an evaluation, since which of its requests."""

    member: MemberKey
    incarnation: int
    request: int


@dataclass(slots=True)
class EvalDesk:
    """Hands each due evaluation to one live sampler. Volatile: after a restart it is handed out again."""

    is_live: Callable[[MemberKey, int], bool]
    assigned: dict[str, Assignment] = field(default_factory=dict)

    def order(self, state: State, rules: Rules, asking: Assignment, held: Version | None) -> bool:
        """Whether who asks is to score the version it holds, and is now charged with that.

        Said once: only the same request, whose answer was lost, is told again.
        """
        if held is None or held not in state.published or _void(state, held):
            return False
        due = milestone(rules, held.step, last_step(state, rules))
        if not due or self._scored(state, rules, due):
            return False
        holder = self.assigned.get(due)
        if holder is not None and holder != asking and self.is_live(holder.member, holder.incarnation):
            return False
        self.assigned[due] = asking
        return True

    def _scored(self, state: State, rules: Rules, due: str) -> bool:
        last = last_step(state, rules)
        return any(milestone(rules, version.step, last) == due and not _void(state, version) for version in state.evals)


def _void(state: State, version: Version) -> bool:
    return version in state.published and state.published[version].void
