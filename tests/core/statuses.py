"""Status answers for tests of what is shown."""

from __future__ import annotations

import json
from typing import Any

from forebay.wire.v1 import common_pb2, control_pb2


def member(
    name: str, *, role: int = common_pb2.ROLE_SAMPLER, state: str = "live", incarnation: int = 1, **gauges: float
) -> control_pb2.MemberStatus:
    """A member that generates with version 1.2."""
    return control_pb2.MemberStatus(
        member=common_pb2.Member(role=role, id=name, incarnation=incarnation),  # type: ignore[arg-type]
        fleet="local",
        region="local",
        state=state,
        doing="generating",
        since_s=3.0,
        seen_s=12.0,
        version=common_pb2.Version(incarnation=1, step=2),
        digest=b"\x01\xff",
        gauges=gauges,
        groups=5,
    )


def status(*members: control_pb2.MemberStatus, **fields: Any) -> control_pb2.StatusResponse:
    """A run in its third step."""
    metrics = {"reward_mean": 0.5, "loss": 0.01, "kl": 0.001, "staleness_mean": 1.0, "tokens_per_s": 800.0}
    seconds = {"forward": 2.0, "backward": 1.0, "wait_buffer": 1.0}
    given = {
        "run": "small",
        "state": "running",
        "limited_by": "samplers: 3 groups short",
        "step": 3,
        "steps": 10,
        "newest": common_pb2.Version(incarnation=1, step=3),
        "groups_ready": 4,
        "permits_outstanding": 6,
        "groups_leased": 2,
        "learner_metrics_json": json.dumps({**metrics, "seconds": seconds}),
        "run_json": json.dumps({"learner": {"groups_per_step": 4, "max_staleness": 4}}),
        "weight_bytes_published": 1_500_000,
        "weight_bytes_full": 30_000_000,
    }
    return control_pb2.StatusResponse(members=members, **{**given, **fields})


def evaluated(step: int, score: float, incarnation: int = 1) -> control_pb2.EvalResult:
    """A held-out score."""
    version = common_pb2.Version(incarnation=incarnation, step=step)
    return control_pb2.EvalResult(version=version, score=score, stderr=0.02, prompts=200)
