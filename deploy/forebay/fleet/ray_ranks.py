"""The ranks of a learner on a Ray cluster: a placement group, and in each of its bundles an actor with a process."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from forebay.errors import UsageError
from forebay.fleet.ranks import LocalRank, environment_of, watch
from forebay.fleet.wakeups import Wakeups

log = logging.getLogger(__name__)

TICK_S = 1.0
#: What a rank counts as whose machine or actor is gone.
LOST = -9
#: Seconds without a place for all ranks between two words about it.
WORD_EVERY_S = 30.0
#: The answer of an actor that lives takes no longer.
ANSWER_S = 30.0


def run_ranks_on_ray(words: Sequence[str], count: int, cpus: int) -> int:
    """Like `run_ranks`, for the command `python WORDS`, wherever the cluster at $RAY_ADDRESS (default: the one of this
    machine) has room for a rank: `cpus` cores and, in a cluster with GPUs, one of them. Waits until it has for all.

    Raises UsageError when no cluster answers.
    """
    _join(os.environ.get("RAY_ADDRESS") or "auto")
    try:
        with Wakeups() as wakeups:
            return _run(words, count, cpus, wakeups)
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    try:
        if address != "auto":  # Ray itself would wait for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
        ray.init(address, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f'learner.launcher is "ray", but no cluster answers at {address} (RAY_ADDRESS: HOST:PORT, or auto, one on '
            "this machine); `ray start --head` starts one"
        ) from error


def _run(words: Sequence[str], count: int, cpus: int, wakeups: Wakeups) -> int:
    group = placement_group([_bundle(cpus)] * count, strategy="PACK")
    try:
        if not _placed(group, count, wakeups):
            return 0
        actors = [_actor(group, index) for index in range(count)]
        nodes: list[str] = _answers([actor.node.remote() for actor in actors])
        meeting = _answers([actors[0].meeting.remote()])[0]
        here = Counter(nodes)
        # An actor sees its own accelerator alone, so that is number 0 of each rank.
        environments = [
            environment_of(rank, count, meeting, local_rank=0, here=here[node]) for rank, node in enumerate(nodes)
        ]
        log.info("%d ranks on %d machines of the Ray cluster", count, len(here))
        ranks = [RayRank(*each, words) for each in zip(actors, environments, strict=True)]
        return watch(ranks, wakeups)
    finally:
        remove_placement_group(group)


def _bundle(cpus: int) -> dict[str, float]:
    return {"CPU": cpus, **({"GPU": 1} if ray.cluster_resources().get("GPU") else {})}


def _placed(group: PlacementGroup, count: int, wakeups: Wakeups) -> bool:
    """Wait for room, and say now and then that there is none; False when somebody wants to stop first."""
    waited_s = 0.0
    while not group.wait(TICK_S):
        if wakeups.stops:
            return False
        if waited_s % WORD_EVERY_S == 0:
            log.warning("waiting: room for %d ranks of %s in a Ray cluster with %s free", count,
                        _told(group.bundle_specs[0]), _told(ray.available_resources()))  # fmt: skip
        waited_s += TICK_S
    return True


def _told(resources: dict[str, float]) -> str:
    found = [f"{amount:g} {name}" for name, amount in sorted(resources.items()) if name in ("CPU", "GPU")]
    return " and ".join(found) or "nothing"


class RankHost:
    """An actor: starts the rank's process on its machine and speaks for it. The process dies with it."""

    def __init__(self) -> None:
        self._process: LocalRank | None = None

    def node(self) -> str:
        """The machine, by Ray's name."""
        return str(ray.get_runtime_context().get_node_id())

    def meeting(self) -> str:
        """An address of this machine that was free a moment ago."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as server:
            return f"{host}:{server.getsockname()[1]}"

    def start(self, words: Sequence[str], environment: dict[str, str], folder: str) -> None:
        """`python WORDS`, in `folder` where that is known here."""
        if Path(folder).is_dir():
            os.chdir(folder)
        self._process = LocalRank([sys.executable, *words], environment)

    def poll(self) -> int | None:
        """See Rank."""
        return self._process.poll() if self._process else None

    def terminate(self) -> None:
        """See Rank."""
        if self._process:
            self._process.terminate()

    def kill(self) -> None:
        """See Rank."""
        if self._process:
            self._process.kill()


class RayRank:
    """A rank that an actor speaks for."""

    def __init__(self, actor: Any, environment: dict[str, str], words: Sequence[str]) -> None:
        self._actor = actor
        self._ended: int | None = None
        ray.get(actor.start.remote(list(words), environment, str(Path.cwd())), timeout=ANSWER_S)

    def poll(self) -> int | None:
        """See Rank. One whose actor or machine is gone was killed."""
        if self._ended is None:
            try:
                self._ended = ray.get(self._actor.poll.remote(), timeout=ANSWER_S)
            except (RayActorError, ray.exceptions.GetTimeoutError) as error:
                log.error("a rank is lost: %s", str(error).partition("\n")[0])
                self._ended = LOST
        return self._ended

    def terminate(self) -> None:
        """See Rank."""
        self._actor.terminate.remote()

    def kill(self) -> None:
        """See Rank."""
        if self._ended is None:
            self._actor.kill.remote()
        ray.kill(self._actor)


def _actor(group: PlacementGroup, index: int) -> Any:
    bundle = group.bundle_specs[index]
    placed = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": placed}
    return ray.remote(RankHost).options(**options).remote()


def _answers(calls: Sequence[Any]) -> list[Any]:
    answers: list[Any] = ray.get(list(calls), timeout=ANSWER_S)
    return answers
