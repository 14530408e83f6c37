"""Each due evaluation goes to one sampler, and the run ends only after the last one."""

from __future__ import annotations

from pathlib import Path

from forebay.buffer.evals import milestone
from forebay.buffer.rules import Rules
from forebay.wire.v1 import control_pb2
from forebay.wire.version import Version
from tests.buffer.conftest import Serve
from tests.buffer.support import anchor, join_learner, join_sampler, make_run, produce

V0 = Version(1, 0)


def test_milestones() -> None:
    run = make_run(Path("unused"), steps=10)
    rules = Rules.of(
        run.model_copy(
            update={
                "task": run.task.model_copy(update={"heldout_prompts": 5}),
                "observe": run.observe.model_copy(update={"eval_every_steps": 4}),
            }
        )
    )
    said = [milestone(rules, step, 10) for step in range(11)]
    assert said == [
        "start",
        "",
        "",
        "",
        "1",
        "1",
        "1",
        "1",
        "2",
        "2",
        "end",
    ]
    assert milestone(Rules.of(run), 10, 10) == ""


async def test_orders_and_the_end(serve: Serve) -> None:
    async with (
        serve(steps=1, task={"heldout_prompts": 5}) as served,
        served.client() as learner,
        served.client() as first,
        served.client() as second,
    ):
        await join_learner(learner, served.run)
        await join_sampler(first, served.run, "first")
        await join_sampler(second, served.run, "second")
        assert Version.from_proto((await first.admit(0, V0, 0.0)).eval.version) == V0
        assert not (await first.admit(0, V0, 0.0)).HasField("eval")
        assert not (await second.admit(0, V0, 0.0)).HasField("eval")
        await first.leave("spot notice")
        assert (await second.admit(0, V0, 0.0)).HasField("eval")
        await second.report_eval(control_pb2.EvalResult(version=V0.to_proto(), score=0.25, prompts=5))
        assert [result.score for result in (await learner.history()).evals] == [0.25]
        await produce(second, 4, V0)
        await learner.lease(1, 1.0)
        await learner.publish(anchor(Version(1, 1), seed=1))
        await learner.commit(1, 1, {})
        status = await learner.status()
        assert (status.state, status.limited_by) == ("running", "samplers: a sampler to evaluate step 1")
        answer = await second.admit(1, Version(1, 1), 0.0)
        assert (answer.finished, answer.HasField("eval")) == (False, True)
        await second.report_eval(control_pb2.EvalResult(version=Version(1, 1).to_proto(), score=0.5, prompts=5))
        assert (await second.admit(1, Version(1, 1), 0.0)).finished
        assert (await second.heartbeat("waiting", 0.0, None, b"", {})).finished
