"""The learner's life: join, load, publish, then lease, train, publish, save, commit, step after step."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from forebay.buffer.client import Ended, Lease, Membership, Part, Unreachable
from forebay.config.checkpoints import folder_of
from forebay.config.identity import run_json
from forebay.config.models import RunFile
from forebay.config.steering import Steering
from forebay.errors import EXIT_DONE, EXIT_FAILED
from forebay.learner.batch import Batch, batch_metrics, open_batch
from forebay.learner.checkpoint import TORCH_RANDOM, CheckpointStore, Counters, Saved
from forebay.learner.checkpoint_writer import CheckpointWriter
from forebay.learner.device_mirror import DeviceMirror
from forebay.learner.distributed import start_deepspeed
from forebay.learner.errors import BadExperience, KlExceeded, LearnerError
from forebay.learner.heart import Heart
from forebay.learner.lora import load_actor, model_digest
from forebay.learner.port import BufferPort, PartedPort
from forebay.learner.pretrained import load_tokenizer
from forebay.learner.publisher import Publisher
from forebay.learner.ranked_port import RankedPort
from forebay.learner.ranks import Ranks
from forebay.learner.roles import load_roles
from forebay.learner.sequence_parallel import check_heads
from forebay.learner.snapshot import copy_to_host, host_specs
from forebay.learner.stop import Stop
from forebay.learner.trainer import Trainer
from forebay.obs.phases import PhaseClock
from forebay.wire.weights import HostState

#: Seconds that one call for a batch waits at the buffer; a request to stop waits no longer than this.
LEASE_WAIT_S = 2.0
#: In what torch's collective calls raise when a process that takes part is gone.
RANK_LOST = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
#: Seconds that a learner on its way out gives its last publication.
LEAVE_S = 10.0

log = logging.getLogger(__name__)


def run_learner(run: RunFile, client: PartedPort, stop: Stop) -> int:
    """Train until the last step, a request to stop, or a failure; returns the exit code. Raises UsageError and the
    errors of `forebay.learner.errors`, having left the buffer properly."""
    start_deepspeed()
    ranks = Ranks.of_process_group()
    data = ranks.in_teams(run.learner.sequence_parallel)
    checkpoints = CheckpointStore(folder_of(run.run.home), run.learner.keep_checkpoints)
    if ranks.is_lead:
        checkpoints.prepare()
    port = RankedPort(client, ranks, Part(part=data.rank, parts=data.count))
    learner = Learner(run, port, stop, checkpoints, ranks, data)
    try:
        return learner.live()
    except KlExceeded as error:
        port.pause(f"{error}; `forebay resume` goes on from the last good version, --from and --set differently")
        log.error("paused: %s", error)
        return EXIT_FAILED
    except RuntimeError as error:
        if any(sign in str(error) for sign in RANK_LOST):
            raise LearnerError(f"another rank of this learner ended: {str(error).partition('. ')[0]}") from error
        raise
    finally:
        learner.leave()


class Learner:
    """One incarnation of the learner, or one rank of it: all ranks go through the same steps side by side, and the
    lead alone is asked to stop, saves, and speaks with the buffer."""

    def __init__(
        self, run: RunFile, client: BufferPort, stop: Stop, checkpoints: CheckpointStore, ranks: Ranks, data: Ranks
    ) -> None:
        """`data`: the ranks that have other data than this one, see `Ranks.in_teams`."""
        self._run, self._client, self._stop, self._checkpoints, self._ranks = run, client, stop, checkpoints, ranks
        self._clock = PhaseClock()
        self._ended = ""  #: why the data ended, once it has
        torch.manual_seed(run.run.seed)
        saved = ranks.agreed(checkpoints.newest())
        self._model: PreTrainedModel = load_actor(run, saved.folder if saved else None)
        check_heads(self._model, run.learner.sequence_parallel)
        self._tokenizer = load_tokenizer(run.model)
        if run.learner.gradient_checkpointing:
            self._model.gradient_checkpointing_enable()
        specs = host_specs(self._model, getattr(torch, run.publish.dtype))
        self._host = HostState.allocate(specs if ranks.is_lead else [])
        on_device = run.publish.difference == "device"
        self._fill = DeviceMirror(self._model).fill if on_device else partial(copy_to_host, self._model)
        self._steering, self._steered = ranks.agreed(Steering.read(run.run.home)), run
        self._roles = load_roles(
            self._steering.widest(run), self._model, data, stop=stop, tell=lambda doing: self._heart.doing(doing)
        )
        self._trainer = Trainer(self._roles, run, self._clock)
        self._step = self._restored(saved)  #: committed last
        self._writer, self._told_saved = CheckpointWriter(self._step), self._step
        self._membership = self._joined()
        self._publisher = Publisher(
            client,
            specs,
            self._membership.member.incarnation,
            anchor_every=run.publish.anchor_every,
            classes=run.publish.codec == "classes",
            model_digest=model_digest(run) if ranks.is_lead else b"",
            ranks=ranks,
        )
        self._heart = Heart(client, stop, self._publisher, self._membership.heartbeat_s)

    def live(self) -> int:
        """The main loop. Returns the exit code."""
        with self._heart:
            self._start()
            for step in range(self._step + 1, self._run.learner.steps + 1):
                batch = self._batch(step)
                if batch is None:
                    break
                lease, experience = batch
                metrics = self._train(step, experience)
                self._publish_if_due(step)
                self._checkpoint_if_due(step)
                self._commit(lease, experience, metrics)
            return self._finish()

    def leave(self) -> None:
        """Say goodbye; harmless after a failure."""
        self._publisher.close(timeout_s=LEAVE_S)
        with suppress(LearnerError):
            self._writer.wait(LEAVE_S)
        with suppress(Unreachable):
            self._client.leave(self._stop.reason or "done")

    def _joined(self) -> Membership:
        """Membership, with the buffer rewound to what this learner resumes from."""
        membership = self._client.join("learner", "learner", "learner", "center", run_json(self._run))
        step = self._step
        if step > membership.committed_step:
            # Killed between a checkpoint and its commit: the step is trained, and must not be trained again.
            self._client.commit(step, step, {})
        replayed = self._client.rewind(step)
        log.info("joined run %s as incarnation %d at step %d, %d batches to train again",
                 membership.run, membership.member.incarnation, step, replayed)  # fmt: skip
        return membership

    def _restored(self, saved: Saved | None) -> int:
        """Which step that is."""
        if saved is None:
            return 0
        tensors = saved.tensors()
        torch.set_rng_state(tensors[TORCH_RANDOM])
        try:
            self._roles.restore(tensors, saved.counters)
        except KeyError as error:
            raise LearnerError(
                f"{saved.folder} has no {error.args[0]}: it was saved with another model or another learner.estimator; "
                "start with the run file that it was saved with, or a new run"
            ) from error
        self._trainer.resume(saved.counters.skipped)
        log.info("resuming from %s", saved.folder)
        return saved.counters.step

    def _start(self) -> None:
        """Publish the weights that training starts from, and wait until the buffer has them, and for the reference."""
        self._heart.doing(f"publishing step {self._step}")
        copy_to_host(self._model, self._host)
        self._publisher.adopt(self._host, self._fill)
        self._offer(self._step)
        while not self._ranks.agreed(self._publisher.wait_stored(timeout_s=LEASE_WAIT_S) or self._stop.asked):
            pass
        if self._roles.reference is not None:
            self._roles.reference.ready()
        self._clock.take()

    def _batch(self, step: int) -> tuple[Lease, Batch] | None:
        """The batch of `step`, without groups that cannot be read; None when it will not come, or on a stop."""
        while (lease := self._lease(step)) is not None:
            batch = self._opened(lease)
            if batch is not None:
                return lease, batch
        return None

    def _opened(self, lease: Lease) -> Batch | None:
        """None when a rank cannot read its part; what it cannot read has been rejected then."""
        batch, damage = None, None
        try:
            with self._clock.phase("decode"):
                batch = open_batch(lease)
        except BadExperience as error:
            damage = error.group_ids, str(error)
        found = [of_rank for of_rank in self._ranks.gathered(damage) if of_rank is not None]
        if not found:
            return batch
        problem = "; ".join(told for _, told in found)
        log.error("%s", problem)
        rejected = dict.fromkeys(group_id for group_ids, _ in found for group_id in group_ids)
        self._client.reject(lease, list(rejected), problem)
        return None

    def _lease(self, step: int) -> Lease | None:
        """What the buffer leases for `step`; None when asked to stop first, or when the data has ended."""
        self._heart.doing(f"waiting: batch of step {step}")
        with self._clock.phase("wait_buffer"):
            while not self._ranks.agreed(self._stop.asked):
                answer = self._client.lease(step, LEASE_WAIT_S)
                if isinstance(answer, Lease):
                    return answer
                if isinstance(answer, Ended):
                    self._ended = answer.cause
                    return None
                self._heart.doing(f"waiting: {answer.cause}")
        return None

    def _train(self, step: int, batch: Batch) -> dict[str, float]:
        self._heart.doing(f"training step {step}")
        self._steer(step)
        return self._trainer.train(step, batch)

    def _steer(self, step: int) -> None:
        """Train as somebody wanted who resumed the run. Raises LearnerError when that was after this process began."""
        if self._ranks.agreed(self._ranks.is_lead and self._is_overtaken()):
            raise LearnerError(
                "the run was resumed from an earlier checkpoint or with other settings; start the learner again"
            )
        wanted = self._steering.at(self._run, step)
        if wanted != self._steered:
            self._trainer, self._steered = self._trainer.steered(wanted), wanted
            log.info("from step %d on with other settings: %s", step, self._steering.told(step))

    def _is_overtaken(self) -> bool:
        newest = self._checkpoints.newest()
        gone_back = (newest.counters.step if newest else 0) < self._writer.saved_step
        return gone_back or Steering.read(self._run.run.home) != self._steering

    def _publish_if_due(self, step: int) -> None:
        if step % self._run.publish.every_steps == 0 or self._is_last(step):
            self._offer(step)

    def _offer(self, step: int) -> None:
        with self._clock.phase("publish_copy"):
            self._publisher.offer(step, self._fill)

    def _checkpoint_if_due(self, step: int) -> None:
        due = step % self._run.learner.checkpoint_every_steps == 0
        if self._ranks.agreed(due or self._is_last(step) or self._stop.asked):
            self._checkpoint(step)

    def _checkpoint(self, step: int) -> None:
        self._heart.doing(f"saving step {step}")
        with self._clock.phase("checkpoint"):
            self._writer.wait()  # for the host copy, too
            copy_to_host(self._model, self._host)
            updates, critic_updates = self._roles.updates()
            counters = Counters(
                step=step, updates=updates, skipped=self._trainer.skipped, critic_updates=critic_updates
            )
            trainer = chain(self._roles.state(), [(TORCH_RANDOM, torch.get_rng_state())])
            if not self._ranks.is_lead:
                deque(trainer, maxlen=0)
                return
            copied = self._writer.copied(trainer)
            save = partial(self._checkpoints.save, counters, self._host, self._model, self._tokenizer, copied)
            self._writer.start(step, save)

    def _commit(self, lease: Lease, batch: Batch, metrics: Mapping[str, float]) -> None:
        step = lease.step
        if self._is_last(step):
            self._heart.doing(f"publishing step {step}")
            with self._clock.phase("publish"):
                self._publisher.wait_stored()
                self._writer.wait()
        told = self._told(step, batch, metrics)
        self._told_saved = self._writer.saved_step
        self._client.commit(step, self._told_saved, told, lease.attempt)
        self._step = step
        if self._ranks.is_lead:
            _append_line(self._run.run.home / "learner" / "metrics.jsonl", {"step": step, **told})
        shown = (told[key] for key in ("reward_mean", "kl", "tokens_per_s"))
        log.info("step %d: reward %.3f, kl %.2g, %.0f tokens/s", step, *shown)

    def _told(self, step: int, batch: Batch, metrics: Mapping[str, float]) -> dict[str, Any]:
        seconds = self._clock.take()
        found = batch_metrics(batch.trajectories, step, self._roles.ranks)
        stored = self._publisher.last
        tokens_per_s = (found["generated_tokens"] + found["prompt_tokens"]) / max(sum(seconds.values()), 1e-9)
        self._heart.gauges = {"tokens_per_s": tokens_per_s}
        return {
            **found,
            **metrics,
            "tokens_per_s": tokens_per_s,
            "published_bytes": self._publisher.take_sent_bytes(),
            "full_bytes": stored.full_bytes if stored else 0,
            "seconds": seconds,
        }

    def _finish(self) -> int:
        """Done, or asked to stop: nothing trained is left unsaved, nothing offered unsent unless the buffer is away."""
        step = self._step
        if self._ended:
            log.info("finished after step %d: %s", step, self._ended)
            if step % self._run.publish.every_steps:
                self._offer(step)
            self._publisher.wait_stored()
        failed = self._ranks.agreed(self._stop.failed)
        self._writer.wait()
        if self._ranks.agreed(step > self._writer.saved_step) and not failed:
            self._checkpoint(step)
            self._writer.wait()
        if self._writer.saved_step > self._told_saved:
            self._tell_saved(step)
        if self._stop.asked:
            log.info("stopping after step %d: %s", step, self._stop.reason)
        return EXIT_FAILED if failed else EXIT_DONE

    def _tell_saved(self, step: int) -> None:
        try:
            self._client.commit(step, self._writer.saved_step, {})
        except Unreachable as error:
            log.warning("step %d is saved, but the buffer was not told (%s); the next start tells it", step, error)

    def _is_last(self, step: int) -> bool:
        return step == self._run.learner.steps


def _append_line(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
