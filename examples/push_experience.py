"""Push experience from a program of your own, without torch or vLLM: `python -m examples.push_experience HOST:PORT 8`.

The policy here picks tokens at random, so that their log-probabilities are known exactly: put yours in its place.
"""

import json
import math
import sys

import numpy as np

from forebay.buffer.client import BlockingClient
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.version import Version

PROMPT, VOCABULARY = np.array([1, 2, 3], np.int32), 100


def reply(group: int, member: int, version: Version) -> Trajectory:
    tokens = np.random.default_rng((group, member)).integers(VOCABULARY, size=8, dtype=np.int32)
    return Trajectory(
        group_id=group, member=member, prompt_tokens=PROMPT, tokens=tokens, loss_mask=np.ones(8, np.bool_),
        logprobs=np.full(8, -math.log(VOCABULARY), np.float32), spans=(VersionSpan(start=0, version=version),),
        temperature=1.0, top_p=1.0, reward=float((tokens % 2).mean()))  # fmt: skip


def push(address: str, groups: int) -> None:
    with BlockingClient(address) as buffer:
        run_json = buffer.status().run_json
        size: int = json.loads(run_json)["learner"]["group_size"]
        buffer.join("sampler", "pusher", fleet="mine", region="", run_json=run_json)
        version = Version.from_proto(next(buffer.watch()).version)
        for permit in buffer.admit(groups, version, wait_s=10.0).permits:
            buffer.push([reply(permit.group_id, member, version) for member in range(size)], [permit])
        buffer.leave("done")


if __name__ == "__main__":
    push(sys.argv[1], int(sys.argv[2]))
