"""What is shown of a run: the picture, the log line, the events, the JSON."""

from __future__ import annotations

import io
import json

from rich.console import Console

from forebay.obs.events import changes
from forebay.obs.live import Display
from forebay.obs.view import Picture, fill_bar, human_bytes, plain_line, render
from forebay.obs.wire_json import plain
from forebay.wire.v1 import common_pb2, control_pb2
from tests.core.statuses import evaluated, member, status


def shown(answer: control_pb2.StatusResponse | None, **more: tuple[str, ...]) -> str:
    """The picture as text."""
    console = Console(file=io.StringIO(), width=120)
    console.print(render(Picture(title="small", status=answer, **more)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def test_the_picture_has_everything() -> None:
    learner = member("learner", role=common_pb2.ROLE_LEARNER)
    text = shown(status(member("sampler-0", tokens_per_s=540.4), learner, evals=[evaluated(0, 0.25)]))
    for part in (
        "small · running · step 3/10 · held-out step 0: 0.250",
        "sampler-0",
        "1.2 (−1)",
        "540",
        "generating 3 s",
        "4 ready · 6 being generated · 2 leased · of 20 groups",
        "step 3 of 10: generating 3 s",
        "reward 0.500 · loss 0.0100 · KL 0.001 · staleness 1.00 · tok/s 800",
        "4.0 s: forward 50 %, backward 25 %, wait_buffer 25 %",
        "1.5 MB published, 5 % of the 30.0 MB that full copies would be",
        "limited by samplers: 3 groups short",
    ):
        assert part in text


def test_a_lost_sampler_says_since_when_and_one_that_left_is_gone() -> None:
    text = shown(status(member("a", state="lost"), member("b", state="left")))
    assert "lost: silent for 12 s" in text
    assert " b " not in text


def test_before_anything_is_there() -> None:
    assert "waiting for the buffer" in shown(None)
    assert "no sampler yet" in shown(control_pb2.StatusResponse())


def test_many_samplers_are_cut() -> None:
    assert "and 6 more" in shown(status(*(member(f"s{index:02}") for index in range(30))))


def test_names_from_the_wire_are_no_markup() -> None:
    sampler = member("[red]x[/]")
    sampler.doing, sampler.fleet = "[dim]doing", "[dim]fleet"
    text = shown(status(sampler, limited_by="[bold]y"), events=("[blink]z",))
    assert all(name in text for name in ("[red]x[/]", "[dim]doing", "[dim]fleet", "[bold]y", "[blink]z"))


def test_the_log_line() -> None:
    line = plain_line(status(member("a", tokens_per_s=100.0), member("b", tokens_per_s=200.0)))
    assert line == (
        "step 3/10, reward 0.500, loss 0.0100, KL 0.001, staleness 1.00, tok/s 800, 4 groups ready, "
        "2 samplers 300 tok/s, limited by samplers: 3 groups short"
    )


def test_the_bar_is_always_full_width() -> None:
    for ready, going in ((0, 0), (1, 0), (10, 10), (30, 5)):
        assert len(fill_bar([(ready, "blue"), (going, "cyan")], 20).plain) == 40


def test_bytes_in_words() -> None:
    assert [human_bytes(count) for count in (0, 999, 1500, 2.5e6, 7e9, 8e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "7.0 GB",
        "8.0 TB",
    ]


def test_events_are_the_difference_of_two_looks() -> None:
    before = status(member("a"), member("b"))
    after = status(member("a", incarnation=2), member("b", state="lost"), member("c"), state="paused")
    assert changes(before, after) == [
        "sampler a is back (incarnation 2)",
        "sampler b lost",
        "sampler c joined from local in local",
        "the run is paused",
    ]
    assert changes(after, after) == []


def test_events_of_scores_and_failed_installs() -> None:
    before = status(member("a", failed_installs=0.0), evals=[evaluated(0, 0.2)])
    after = status(member("a", failed_installs=1.0), evals=[evaluated(0, 0.2), evaluated(10, 0.9)])
    assert changes(before, after) == [
        "held-out score at step 10: 0.900 ± 0.020",
        "sampler a failed to install weights and keeps serving the version before",
    ]


def test_without_a_terminal_there_is_a_line_a_step_and_one_every_15_s() -> None:
    now, out = [0.0], io.StringIO()
    with Display("small", out, clock=lambda: now[0]) as display:
        for at_s, step in ((0, 3), (1, 3), (2, 4), (16, 4), (17, 4)):
            now[0] = float(at_s)
            display.show(status(step=step))
        display.note("draining")
        display.note("draining")
    lines = [line[10:] for line in out.getvalue().splitlines()]
    assert [line.partition(",")[0] for line in lines] == ["step 3/10", "step 4/10", "step 4/10", "draining"]


def test_json_is_plain_data() -> None:
    answer = status(member("a", tokens_per_s=1.5), evals=[evaluated(0, 0.2)])
    tree = json.loads(json.dumps(plain(answer)))
    assert tree["newest"] == "1.3"
    assert tree["groups_ready"] == 4
    assert tree["learner_metrics"]["seconds"]["forward"] == 2.0
    assert tree["members"][0]["member"] == {"role": "ROLE_SAMPLER", "id": "a", "incarnation": 1, "run": ""}
    assert tree["members"][0]["digest"] == "01ff"
    assert tree["members"][0]["gauges"] == {"tokens_per_s": 1.5}
    assert tree["evals"][0]["score"] == 0.2
    assert plain(control_pb2.StatusResponse())["newest"] is None
