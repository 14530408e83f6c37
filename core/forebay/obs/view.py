"""One picture of a run: samplers, reservoir, learner, weights, and the one thing that limits it now."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forebay.wire.v1 import common_pb2, control_pb2
from forebay.wire.version import Version

BAR_CELLS = 40
EVENTS_SHOWN = 6
SAMPLERS_SHOWN = 24
CAUSES_SHOWN = 5
STATE_STYLE = {"live": "green", "lost": "bold red", "left": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What is known of a run at one moment; `status` is None while no buffer answers."""

    title: str
    status: control_pb2.StatusResponse | None
    events: Sequence[str] = ()
    notes: Sequence[str] = ()


def render(picture: Picture) -> RenderableType:
    """The whole picture, for a rich console."""
    status = picture.status
    if status is None:
        parts: list[RenderableType] = [Text("waiting for the buffer", style="yellow")]
    else:
        parts = [_samplers(status), _reservoir(status), _learner(status), _weights(status), _limit(status)]
    parts += [Text(note, style="yellow") for note in picture.notes]
    parts += [Text(event, style="dim") for event in picture.events[-EVENTS_SHOWN:]]
    return Panel(Group(*parts), title=_title(picture), title_align="left", border_style="blue")


def plain_line(status: control_pb2.StatusResponse) -> str:
    """The picture in one line of a log."""
    samplers = live_samplers(status)
    parts = [f"step {status.step}/{status.steps}", *_metric_words(learner_metrics(status))]
    parts.append(f"{status.groups_ready} groups ready")
    parts.append(
        f"{len(samplers)} {'sampler' if len(samplers) == 1 else 'samplers'} {_tokens_per_s(samplers):.0f} tok/s"
    )
    if status.limited_by:
        parts.append(f"limited by {status.limited_by}")
    return ", ".join(parts)


def learner_metrics(status: control_pb2.StatusResponse) -> dict[str, Any]:
    """Metrics of the newest committed step; empty before the first."""
    metrics: dict[str, Any] = json.loads(status.learner_metrics_json or "{}")
    return metrics


def live_samplers(status: control_pb2.StatusResponse) -> list[control_pb2.MemberStatus]:
    """The samplers that are heard of."""
    return [member for member in _of_role(status, common_pb2.ROLE_SAMPLER) if member.state == "live"]


def _title(picture: Picture) -> Text:
    if picture.status is None:
        return Text.assemble(("forebay", "bold"), f" {picture.title}")
    evals = "".join(f" · held-out step {each.version.step}: {each.score:.3f}" for each in _ends(picture.status.evals))
    step = f"step {picture.status.step}/{picture.status.steps}"
    return Text.assemble(("forebay", "bold"), f" {picture.title} · {picture.status.state} · {step}{evals}")


def _ends(evals: Sequence[control_pb2.EvalResult]) -> list[control_pb2.EvalResult]:
    return [evals[0], evals[-1]] if len(evals) > 1 else list(evals)


def _samplers(status: control_pb2.StatusResponse) -> RenderableType:
    members = [member for member in _of_role(status, common_pb2.ROLE_SAMPLER) if member.state != "left"]
    if not members:
        return Text("no sampler yet", style="yellow")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("fleet", "sampler"):
        table.add_column(name)
    for name in ("version", "tok/s", "groups"):
        table.add_column(name, justify="right")
    table.add_column("doing", overflow="fold")
    for member in sorted(members, key=lambda each: (each.fleet, each.member.id))[:SAMPLERS_SHOWN]:
        table.add_row(*_sampler_cells(member, status.newest.step))
    if len(members) > SAMPLERS_SHOWN:
        table.add_row("", f"and {len(members) - SAMPLERS_SHOWN} more")
    return table


def _sampler_cells(member: control_pb2.MemberStatus, newest_step: int) -> tuple[Text, ...]:
    behind = newest_step - member.version.step
    version = str(Version.from_proto(member.version)) if member.HasField("version") else "–"
    place = member.fleet if member.fleet == member.region else f"{member.fleet} in {member.region}"
    # Text and not strings: what comes from the wire is no markup.
    return (
        Text(place),
        Text(member.member.id, style=STATE_STYLE.get(member.state, "")),
        Text(version + (f" (−{behind})" if behind > 0 and member.HasField("version") else "")),
        Text(f"{member.gauges.get('tokens_per_s', 0.0):.0f}"),
        Text(str(member.groups)),
        Text(_doing(member)),
    )


def _doing(member: control_pb2.MemberStatus) -> str:
    if member.state != "live":
        return f"{member.state}: silent for {member.seen_s:.0f} s"
    return f"{member.doing} {member.since_s:.0f} s"


def _reservoir(status: control_pb2.StatusResponse) -> RenderableType:
    room = max(1, reservoir_size(status))
    bar = fill_bar([(status.groups_ready, "blue"), (status.permits_outstanding, "cyan")], room)
    words = (
        f" {status.groups_ready} ready · {status.permits_outstanding} being generated · {status.groups_leased} leased"
        f" · of {room} groups"
    )
    dropped = "".join(f" · {count} dropped ({reason})" for reason, count in sorted(status.dropped.items()))
    return Text.assemble(("reservoir ", "bold"), bar, words, (dropped, "yellow"))


def reservoir_size(status: control_pb2.StatusResponse) -> int:
    """Groups that admission lets be under way at once: waiting, leased, or being generated."""
    learner = json.loads(status.run_json or "{}").get("learner", {})
    allowed = learner.get("groups_per_step", 0) * (learner.get("max_staleness", 0) + 1)
    return max(int(allowed), int(status.groups_ready + status.permits_outstanding))


def fill_bar(parts: Sequence[tuple[int, str]], total: int, cells: int = BAR_CELLS) -> Text:
    """A bar of `cells` characters; each part is (amount, style), the rest is empty."""
    text, used, amount = Text(), 0, 0
    for index, (part, style) in enumerate(parts):
        amount += part
        end = min(cells, round(cells * amount / total))
        text.append(("█" if index == 0 else "▒") * (end - used), style)
        used = end
    return text.append("░" * (cells - used), "dim")


def _learner(status: control_pb2.StatusResponse) -> RenderableType:
    members = [member for member in _of_role(status, common_pb2.ROLE_LEARNER) if member.state != "left"]
    doing = _doing(members[-1]) if members else "none has joined yet" if status.step < status.steps else "done"
    metrics = learner_metrics(status)
    lines = [Text.assemble(("learner   ", "bold"), f"step {status.step} of {status.steps}: {doing}")]
    if metrics:
        lines.append(Text("          " + " · ".join(_metric_words(metrics))))
        lines.append(Text("          " + _seconds_words(metrics.get("seconds") or {}), style="dim"))
    return Group(*lines)


def _metric_words(metrics: dict[str, Any]) -> list[str]:
    shown = (
        ("reward", "reward_mean", ".3f"),
        ("loss", "loss", ".4f"),
        ("KL", "kl", ".2g"),
        ("staleness", "staleness_mean", ".2f"),
        ("tok/s", "tokens_per_s", ".0f"),
    )
    return [f"{word} {format(float(metrics[key]), form)}" for word, key, form in shown if metrics.get(key) is not None]


def _seconds_words(seconds: dict[str, float]) -> str:
    """Where the last step's seconds went, the largest causes first."""
    total = sum(seconds.values())
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:CAUSES_SHOWN]
    return f"{total:.1f} s: " + ", ".join(f"{cause} {share(s, total)}" for cause, s in largest if s > 0)


def share(part: float, total: float) -> str:
    """`part` of `total` in percent; a dash when there is nothing to share."""
    return f"{100 * part / total:.0f} %" if total > 0 else "–"


def _weights(status: control_pb2.StatusResponse) -> RenderableType:
    newest = str(Version.from_proto(status.newest)) if status.HasField("newest") else "none yet"
    sent = human_bytes(status.weight_bytes_published)
    full = human_bytes(status.weight_bytes_full)
    of_full = share(status.weight_bytes_published, status.weight_bytes_full)
    words = f"newest {newest} · {sent} published, {of_full} of the {full} that full copies would be"
    return Text.assemble(("weights   ", "bold"), words)


def human_bytes(count: float) -> str:
    """`1.2 MB`: decimal units, as in DESIGN's figures."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _limit(status: control_pb2.StatusResponse) -> RenderableType:
    return Text.assemble(("limited by ", "bold"), (status.limited_by or "nothing", "bold magenta"))


def _of_role(status: control_pb2.StatusResponse, role: int) -> list[control_pb2.MemberStatus]:
    return [member for member in status.members if member.member.role == role]


def _tokens_per_s(samplers: Iterable[control_pb2.MemberStatus]) -> float:
    return sum(member.gauges.get("tokens_per_s", 0.0) for member in samplers)
