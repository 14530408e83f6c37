"""Our trainer on a recorded batch: `python -m benchmarks.learner_load.ours CASE DTYPE STEPS`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from benchmarks.learner_load.recorded import CASES
from benchmarks.learner_load.report import report
from forebay.cli.threads import settle_own_threads

#: What a step consists of; everything else is overhead.
WORK = ("forward", "backward", "optimizer")


def main(argv: Sequence[str]) -> None:
    """Train and report."""
    settle_own_threads(alone=True)
    from forebay.learner.batch import Batch
    from forebay.learner.pretrained import load_model
    from forebay.learner.roles import load_roles
    from forebay.learner.trainer import Trainer
    from forebay.obs.phases import PhaseClock

    case, dtype, steps = CASES[argv[0]], argv[1], int(argv[2])
    run, trajectories, clock = case.run(dtype), case.trajectories(), PhaseClock()
    trainer = Trainer(load_roles(run, load_model(run.model.path)), run, clock)
    fleets = dict.fromkeys((one.group_id for one in trajectories), "recorded")
    batch = Batch(trajectories=trajectories, fleets=fleets, group_ids=list(fleets))
    clock.take()
    seconds, phases = list[float](), dict[str, float]()
    for step in range(1, steps + 1):
        began = time.monotonic()
        trainer.train(step, batch)
        seconds.append(time.monotonic() - began)
        taken = clock.take()
        if step > 1:
            phases = {name: phases.get(name, 0.0) + taken.get(name, 0.0) for name in phases | taken}
    outside = 1 - sum(phases.get(name, 0.0) for name in WORK) / sum(phases.values())
    report(trajectories, seconds, overhead_share=round(outside, 4), phases={k: round(v, 3) for k, v in phases.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
