"""Push experience from a program of your own, without torch or vLLM: `python -m examples.push_experience HOST:PORT 8`.

The policy here picks tokens at random, so that their log-probabilities are known exactly: put yours in its place.
"""

import json
import math
import sys
from functools import partial

import numpy as np

from forebay.buffer.client import BlockingClient, Membership
from forebay.wire.experience import encode_frame
from forebay.wire.trajectory import Trajectory, VersionSpan
from forebay.wire.v1.experience_pb2 import Frame, Permit
from forebay.wire.version import Version

PROMPT, VOCABULARY = np.array([1, 2, 3], np.int32), 100


def reply(group: int, member: int, version: Version) -> Trajectory:
    tokens = np.random.default_rng((group, member)).integers(VOCABULARY, size=8, dtype=np.int32)
    return Trajectory(
        group_id=group, member=member, prompt_tokens=PROMPT, tokens=tokens, loss_mask=np.ones(8, np.bool_),
        logprobs=np.full(8, -math.log(VOCABULARY), np.float32), spans=(VersionSpan(start=0, version=version),),
        temperature=1.0, top_p=1.0, reward=float((tokens % 2).mean()))  # fmt: skip


def frame(me: Membership, permit: Permit, version: Version, size: int, sequence: int) -> Frame:
    replies = [reply(permit.group_id, member, version) for member in range(size)]
    return encode_frame(
        replies, run=me.run, sampler=me.member.id, incarnation=me.member.incarnation, fleet="mine", region="",
        sequence=sequence, attempts={permit.group_id: permit.attempt})  # fmt: skip


def push(address: str, groups: int) -> None:
    with BlockingClient(address) as buffer:
        run_json = buffer.status().run_json
        size: int = json.loads(run_json)["learner"]["group_size"]
        me = buffer.join("sampler", "pusher", fleet="mine", region="", run_json=run_json)
        version = Version.from_proto(next(buffer.watch()).version)
        for permit in buffer.admit(groups, version, wait_s=10.0).permits:
            buffer.append(partial(frame, me, permit, version, size))
        buffer.leave("done")


if __name__ == "__main__":
    push(sys.argv[1], int(sys.argv[2]))
