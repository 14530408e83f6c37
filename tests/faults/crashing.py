"""Runs in which the buffer, or the learner, dies; and what was found after each."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from tests.faults.cast import Learner, Sampler
from tests.faults.scenario import generate, play
from tests.faults.world import World

#: What a death means: "kill" leaves the files, "lost" and "torn" take the power away. A second death comes soon after.
FATES = ("kill", "lost", "torn", "kill, then lost", "kill, then torn")


@dataclass(slots=True)
class Tally:
    """What was tried, and what was found."""

    points: int = 0
    boots: int = 0
    learners: int = 0
    frames: int = 0
    commits: int = 0
    failures: list[str] = field(default_factory=list)

    async def close(self, world: World, learner: Learner, where: str) -> None:
        """The run is over: check it."""
        history = world.history
        trained = [group for groups in history.commits.values() for group in groups]
        if list(learner.weights) != trained:
            self.failures.append(f"{where}: the weights saw {learner.weights}, the steps {trained}")
        self.failures += [f"{where}: {problem}" for problem in await world.verdict()]
        self.points, self.boots, self.learners = (
            self.points + 1,
            self.boots + world.boots,
            self.learners + learner.restarts,
        )
        self.frames, self.commits = self.frames + len(history.stored), self.commits + len(history.commits)


async def crash_everywhere(*, seed: int, fate: str, every: int, rng: random.Random) -> Tally:
    """Die at operations 1, 1 + `every`, … until the run gets through without; `fate` is one of FATES."""
    tally, first, _, second = Tally(), *fate.partition(", then ")
    for crash_at in itertools.count(1, every):
        crashes: list[tuple[int | None, str]] = [(crash_at, first)]
        if second:
            crashes.append((rng.randint(1, 25), second))
        where = f"seed {seed}, {crashes}"
        world = World(seed, crashes, steps=5)
        try:
            learner = await play(world, seed)
            await tally.close(world, learner, where)
        except Exception as error:
            raise AssertionError(where) from error
        if world.boots == 2:  # the one at the start and the one before the verdict: nothing crashed
            return tally
    raise AssertionError


async def kill_and_resume(*, cycles: int, seed: int) -> Tally:
    """One long run with a kill a cycle: of the buffer, of the learner at one of four moments, or of both."""
    rng, tally = random.Random(seed), Tally()
    world = World(seed, [], steps=10 * cycles, keep_checkpoints=4, max_attempts=1000)
    learner, sampler = Learner(world), Sampler(world, "s0")
    await learner.start()
    await sampler.start()
    for cycle in range(cycles):
        for _ in range(rng.randint(0, 2)):
            await _step(rng, learner, sampler, "")
        if cycle % 2:
            await world.restart(rng.choice(("kill", "lost", "torn")))
        if cycle % 3 < 2:
            await _step(rng, learner, sampler, rng.choice(("leased", "trained", "saved", "committed")))
            await learner.start(rng.randint(0, 3))
    await tally.close(world, learner, f"seed {seed}")
    return tally


async def _step(rng: random.Random, learner: Learner, sampler: Sampler, killed_when: str) -> None:
    """One step of the learner, as far as it gets."""
    groups = await learner.lease()
    while not groups:
        await generate(rng, [sampler], learner)
        groups = await learner.lease()
    if killed_when == "leased":
        return
    learner.train(groups, checkpoint=killed_when == "saved" or rng.random() < 0.5)
    if killed_when in ("trained", "saved"):
        return
    await learner.commit()
    if killed_when != "committed":
        await learner.publish()
