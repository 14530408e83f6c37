"""With a critic and a reference model, an interrupted run ends with the same numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forebay.errors import UsageError
from forebay.learner.errors import LearnerError
from forebay.learner.loop import run_learner
from forebay.learner.stop import Stop
from tests.learner.fake_buffer import FakeBuffer
from tests.learner.test_loop import batch_of, crash_after, run_file, stopping_after

PPO: dict[str, object] = {
    "preset": "ppo", "lr": 1e-3, "critic": {"lr": 1e-3}, "kl_coef": 0.05, "minibatch_trajectories": 6,
}  # fmt: skip


def trained_state(home: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = load_file(
        home / "learner" / "checkpoints" / "step_000004" / "trainer" / "state.safetensors"
    )
    return state


@pytest.mark.parametrize(
    ("dtype", "stage", "kl_in", "interrupt"),
    [
        ("float32", 0, "reward", crash_after),
        ("float32", 2, "loss", stopping_after),
        ("bfloat16", 1, "reward", crash_after),
    ],
)
def test_actor_and_critic_equal_the_uninterrupted_runs_bit_for_bit(
    tmp_path: Path,
    model_folder: Path,
    dtype: str,
    stage: int,
    kl_in: str,
    interrupt: Callable[[FakeBuffer, int], Stop],
) -> None:
    settings = {**PPO, "compute_dtype": dtype, "zero_stage": stage, "kl_in": kl_in}
    straight = FakeBuffer(batch_of)
    assert run_learner(run_file(tmp_path / "a", model_folder, **settings), straight, Stop()) == 0

    broken, run = FakeBuffer(batch_of), run_file(tmp_path / "b", model_folder, **settings)
    try:
        assert run_learner(run, broken, interrupt(broken, 3)) == 0
    except KeyboardInterrupt:
        assert interrupt is crash_after
    broken.on_commit = lambda step: None
    assert run_learner(run, broken, Stop()) == 0
    assert broken.leased == ([1, 2, 3, 3, 4] if interrupt is crash_after else [1, 2, 3, 4])

    expected, ours = trained_state(tmp_path / "a"), trained_state(tmp_path / "b")
    assert expected.keys() == ours.keys()
    assert {name.split("/")[1] for name in expected if name.startswith("critic/")} == {
        "master",
        "exp_avg",
        "exp_avg_sq",
    }
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name
    assert broken.newest_weights().digest() == straight.newest_weights().digest()


def test_a_checkpoint_of_a_run_without_a_critic_is_refused_in_one_line(tmp_path: Path, model_folder: Path) -> None:
    buffer = FakeBuffer(batch_of)
    assert run_learner(run_file(tmp_path, model_folder, steps=2), buffer, Stop()) == 0
    with pytest.raises(LearnerError, match=r"step_000002 has no critic/.*learner\.estimator") as caught:
        run_learner(run_file(tmp_path, model_folder, **PPO), buffer, Stop())
    assert not isinstance(caught.value, UsageError)
    assert "\n" not in str(caught.value)
