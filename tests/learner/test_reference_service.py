"""The reference model in another process: the same numbers, whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forebay.config.models import RunFile
from forebay.errors import UsageError
from forebay.learner.errors import LearnerError
from forebay.learner.packing import idle
from forebay.learner.reference import client as client_module
from forebay.learner.reference.client import RemoteReference
from forebay.learner.reference.model import ReferenceModel
from forebay.learner.reference.server import ReferenceServer
from forebay.learner.reference.wire import from_answer, from_request, to_answer, to_request
from forebay.learner.sample import Sample
from forebay.learner.stop import Stop
from forebay.loopback import free_addresses
from forebay.wire.errors import WireError
from forebay.wire.v1.reference_pb2 import LogprobsRequest, LogprobsResponse
from tests.core.run_files import SMALLEST
from tests.learner.models import VOCAB, random_groups
from tests.learner.trainers import batch_of, packed, run_file, trainer_of

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
LONGEST = 64


@pytest.fixture
def address() -> str:
    (free,) = free_addresses(1)
    return free


def run_with(model: Path, address: str | None, **learner: object) -> RunFile:
    return run_file(model, kl_coef=0.1, reference={"address": address}, **learner)


@contextmanager
def serving(run: RunFile) -> Iterator[None]:
    """The service of `run`, in a thread with a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    address = run.learner.reference.address
    assert address is not None

    async def start() -> ReferenceServer:
        server = ReferenceServer(run.model.path, address)
        await server.start()
        model = ReferenceModel(run, torch.device("cpu"))
        await server.open(model, tokens_per_microbatch=run.learner.tokens_per_microbatch)
        return server

    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(DEADLINE_S)
        yield
        asyncio.run_coroutine_threadsafe(server.stop(0.0), loop).result(DEADLINE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


class Asking:
    """A client, and what it told."""

    def __init__(self, run: RunFile) -> None:
        assert run.learner.reference.address is not None
        self.told: list[str] = []
        self.stop, self.waiting = Stop(), threading.Event()
        self.reference = RemoteReference(run, run.learner.reference.address, self.stop, self._tell)

    def _tell(self, doing: str) -> None:
        self.told.append(doing)
        self.waiting.set()


def test_it_trains_as_with_the_model_inside_bit_for_bit(model_folder: Path, address: str) -> None:
    groups, found = random_groups(1), []
    for place in (None, address):
        run = run_with(model_folder, place, epochs=2)
        with serving(run) if place else nullcontext():
            trainer, roles = trainer_of(run)
            metrics = [trainer.train(step, batch_of(groups)) for step in (1, 2)]
        found.append((metrics, {name: tensor.clone() for name, tensor in roles.state()}))
    (metrics, state), (served_metrics, served_state) = found
    assert metrics == served_metrics
    assert metrics[1]["reference_kl"] != 0
    assert all(torch.equal(tensor, served_state[name]) for name, tensor in state.items())


def test_masked_tokens_and_idle_ranks(model_folder: Path, address: str) -> None:
    run = run_with(model_folder, address)
    (batch,) = packed(random_groups(3))
    with serving(run):
        reference = Asking(run).reference
        reference.ready()
        assert torch.equal(reference.logprobs(batch), ReferenceModel(run, torch.device("cpu")).logprobs(batch))
        assert reference.logprobs(idle()).shape == (0,)
        reference.rest()


def test_what_is_asked_arrives_as_it_was() -> None:
    samples = [Sample(trajectory=trajectory) for trajectory in random_groups(5, top_p=0.9)]
    request = to_request("m", samples)
    assert [len(group.replies) for group in request.groups] == [3, 3, 3, 3], "prompts travel once"
    again = from_request(request, vocabulary=VOCAB, longest=LONGEST)
    for sample, other in zip(samples, again, strict=True):
        this, that = sample.trajectory, other.trajectory
        for name in ("prompt_tokens", "tokens", "loss_mask"):
            assert np.array_equal(getattr(this, name), getattr(that, name))
        assert (this.temperature, this.top_p) == pytest.approx((that.temperature, that.top_p))
    parts = [np.arange(3, dtype=np.float32), np.zeros(0, np.float32), np.full(1, -2, np.float32)]
    assert from_answer(to_answer(parts), 4).tolist() == [0, 1, 2, -2]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        ({"tokens": b"\1\0\0"}, "no whole numbers"),
        ({"wanted": b"\1"}, "one 0 or 1 for each token"),
        ({"wanted": b"\1\2"}, "one 0 or 1 for each token"),
        ({"tokens": np.asarray([1, VOCAB], "<i4").tobytes()}, f"outside 0 to {VOCAB - 1}"),
        ({"tokens": np.asarray([1, -1], "<i4").tobytes()}, f"outside 0 to {VOCAB - 1}"),
        ({"tokens": bytes(4 * LONGEST), "wanted": bytes(LONGEST)}, "have 65 tokens, the model takes 64"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_p": 1.5}, "top_p 1.5"),
    ],
)
def test_what_no_model_could_read_is_refused(spoil: dict[str, object], complaint: str) -> None:
    fine = {"tokens": np.asarray([1, 2], "<i4").tobytes(), "wanted": b"\1\0", "temperature": 1.0, "top_p": 1.0}
    request = LogprobsRequest()
    request.groups.add(prompt=bytes(4)).replies.add(**{**fine, **spoil})
    with pytest.raises(WireError, match=complaint):
        from_request(request, vocabulary=VOCAB, longest=LONGEST)


def test_a_reply_without_prompt_is_refused() -> None:
    request = LogprobsRequest()
    request.groups.add().replies.add(temperature=1.0, top_p=1.0)
    with pytest.raises(WireError, match="no prompt"):
        from_request(request, vocabulary=VOCAB, longest=LONGEST)


@pytest.mark.parametrize("values", [[0.0], [0.0, float("nan")]])
def test_an_answer_that_is_none_is_refused(values: list[float]) -> None:
    with pytest.raises(WireError):
        from_answer(LogprobsResponse(logprobs=np.asarray(values, "<f4").tobytes()), 2)


def test_another_model_and_a_bad_question_are_refused(model_folder: Path, other_folder: Path, address: str) -> None:
    run = run_with(model_folder, address)
    with serving(run):
        other = run.learner.model_copy(
            update={"reference": run.learner.reference.model_copy(update={"path": str(other_folder)})}
        )
        with pytest.raises(UsageError, match=r"learner\.reference\.address: the reference at .* is not served here"):
            Asking(run.model_copy(update={"learner": other})).reference.ready()
        (batch,) = packed([replace(t, temperature=-1.0) for t in random_groups(0)])
        with pytest.raises(LearnerError, match=r"refuses: invalid_argument: group 0: temperature -1\.0"):
            Asking(run).reference.logprobs(batch)


def test_it_is_waited_for_by_name_until_told_to_stop(
    model_folder: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(model_folder, address)
    asking = Asking(run)
    waiting = threading.Thread(target=asking.reference.ready)
    waiting.start()
    assert asking.waiting.wait(DEADLINE_S)
    assert asking.told[0].startswith(f"waiting: reference at {address} (unavailable")
    with serving(run):
        waiting.join(DEADLINE_S)
        assert not waiting.is_alive()
    assert asking.told[-1] == "training"

    monkeypatch.setattr(client_module, "HURRIED_S", 0.0)
    asking.stop.ask("SIGTERM")
    with pytest.raises(LearnerError, match=r"told to stop while the reference at .* is away"):
        asking.reference.ready()


class Place:
    """A folder with a run file, and `forebay reference` on it."""

    def __init__(self, folder: Path, model: Path, address: str) -> None:
        text = SMALLEST.replace("./model", str(model))
        settings = f'kl_coef = 0.1\ncompute_dtype = "float32"\n[learner.reference]\naddress = {json.dumps(address)}\n'
        (folder / "run.toml").write_text(f"{text}[learner]\n{settings}")
        self._folder = folder

    def start(self, *words: str) -> subprocess.Popen[str]:
        """`forebay reference run.toml WORDS`."""
        command = [sys.executable, "-m", "forebay.cli.main", "reference", "run.toml", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, cwd=self._folder, env=environment, stderr=subprocess.PIPE, text=True)


def test_a_killed_service_is_missed_and_found_again(tmp_path: Path, model_folder: Path, address: str) -> None:
    place, run = Place(tmp_path, model_folder, address), run_with(model_folder, address)
    (batch,) = packed(random_groups(3))
    expected = ReferenceModel(run, torch.device("cpu")).logprobs(batch)
    asking, first = Asking(run), place.start()
    assert torch.equal(asking.reference.logprobs(batch), expected)
    first.kill()
    first.communicate(timeout=DEADLINE_S)
    asking.waiting.clear()
    answers: list[torch.Tensor] = []
    waiting = threading.Thread(target=lambda: answers.append(asking.reference.logprobs(batch)))
    waiting.start()
    assert asking.waiting.wait(DEADLINE_S)
    second = place.start()
    waiting.join(DEADLINE_S)
    assert torch.equal(answers[0], expected)
    second.send_signal(signal.SIGTERM)
    _, told = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, told
    assert f"reference model {model_folder}: serving on {address}" in told


def test_mistakes_are_told_in_a_line(tmp_path: Path, model_folder: Path) -> None:
    place = Place(tmp_path, model_folder, "0.0.0.0:7095")
    process = place.start()
    _, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert told.splitlines()[-1].startswith("forebay: learner.reference.address: got 0.0.0.0:7095, which others")
