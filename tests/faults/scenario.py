"""A whole run with everything in it that clients do, as the seed will have it."""

from __future__ import annotations

import random

from tests.faults.cast import Learner, Sampler
from tests.faults.world import World

STEPS = 5


async def play(world: World, seed: int, steps: int = STEPS) -> Learner:
    """Join, admit, append, lease, train, commit, publish, and now and then what goes wrong; until the last step."""
    rng = random.Random(seed)
    learner, samplers = Learner(world), [Sampler(world, name) for name in ("s0", "s1")]
    await learner.start()
    for sampler in samplers:
        await sampler.start()
    while learner.step < steps:
        await generate(rng, samplers, learner)
        await _mishap(rng, world, samplers, learner)
        groups = await learner.lease()
        if groups:
            learner.train(groups, checkpoint=rng.random() < 0.6)
            await learner.commit()
            await learner.publish()
    return learner


async def generate(rng: random.Random, samplers: list[Sampler], learner: Learner) -> None:
    """Permits, frames, answers."""
    for sampler in rng.sample(samplers, len(samplers)):
        await sampler.admit(rng.randint(1, 3), learner.newest)
        if rng.random() < 0.2:
            await sampler.refund(again=rng.random() < 0.5)
        sampler.produce(rng.randint(1, 2))
        if rng.random() < 0.2:
            await sampler.deliver()
    for sampler in samplers:
        await sampler.deliver()


async def _mishap(rng: random.Random, world: World, samplers: list[Sampler], learner: Learner) -> None:
    """Nothing, mostly."""
    match rng.randrange(10):
        case 0:
            await rng.choice(samplers).start()
        case 1:
            await learner.start(rng.randint(0, 2))
        case 2:
            await samplers[0].admit(1, learner.newest)
            await samplers[0].start()
        case 3 | 4 | 5:
            await world.snapshot(drop=rng.random() < 0.7)
        case _:
            pass
