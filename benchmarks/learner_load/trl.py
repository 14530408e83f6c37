"""TRL's GRPO trainer on a recorded batch: `python -m benchmarks.learner_load.trl CASE DTYPE STEPS`.

Its generation gives the recorded trajectories; everything after it is TRL's own, with what slows it without need off.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.learner_load.recorded import CASES, Case
from benchmarks.learner_load.report import report
from forebay.cli.threads import settle_own_threads
from forebay.learner.batch import by_group
from forebay.wire.trajectory import Trajectory


def main(argv: Sequence[str]) -> None:
    """Train and report."""
    settle_own_threads(alone=True)
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_trainer import GRPOTrainer

    case, dtype, steps = CASES[argv[0]], argv[1], int(argv[2])
    trajectories, ends = case.trajectories(), list[float]()
    run = case.run(dtype)
    tokenizer = AutoTokenizer.from_pretrained(run.model.path, padding_side="left")
    batch = padded(trajectories, tokenizer.pad_token_id)

    class Recorded(GRPOTrainer):  # type: ignore[misc]  # TRL is not typed
        """The trainer with its generation replaced."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return dict(batch)

    class Laps(TrainerCallback):  # type: ignore[misc]
        """Notes when each step ended."""

        def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
            ends.append(time.monotonic())

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            ends.append(time.monotonic())

    with tempfile.TemporaryDirectory(prefix="forebay-trl-") as scratch:
        trainer = Recorded(
            model=run.model.path,
            args=configuration(case, len(trajectories), dtype, steps, scratch),
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": "recorded"}] * len(trajectories) * (steps + 1)),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            callbacks=[Laps()],
        )
        trainer.train()
    report(trajectories, np.diff(ends).tolist())


def configuration(case: Case, trajectories: int, dtype: str, steps: int, scratch: str) -> Any:
    """One optimizer update a step over the whole batch."""
    from trl.trainer.grpo_config import GRPOConfig

    learner, passes = case.run(dtype).learner, trajectories // case.sequences_per_microbatch
    return GRPOConfig(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": dtype},
        gradient_checkpointing=False,
        per_device_train_batch_size=case.sequences_per_microbatch,
        gradient_accumulation_steps=passes,
        steps_per_generation=passes,
        num_generations=learner.group_size,
        max_completion_length=case.run(dtype).sampler.max_new_tokens,
        temperature=case.run(dtype).sampler.temperature,
        max_steps=steps,
        learning_rate=learner.lr,
        lr_scheduler_type="constant",
        adam_beta1=learner.betas[0],
        adam_beta2=learner.betas[1],
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        beta=0.0,
        loss_type="dapo",  # every token weighs the same, as in ours
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


def padded(trajectories: Sequence[Trajectory], pad: int) -> dict[str, Any]:
    """The batch as TRL has it: prompts padded on the left, replies on the right, both to the longest."""
    import torch

    prompts = [member.prompt_tokens for member in trajectories]
    replies = [member.tokens for member in trajectories]
    longest_prompt, longest_reply = max(map(len, prompts)), max(map(len, replies))
    return {
        "prompt_ids": torch.tensor([[pad] * (longest_prompt - len(ids)) + ids.tolist() for ids in prompts]),
        "prompt_mask": torch.tensor([[0] * (longest_prompt - len(ids)) + [1] * len(ids) for ids in prompts]),
        "completion_ids": torch.tensor([ids.tolist() + [pad] * (longest_reply - len(ids)) for ids in replies]),
        "completion_mask": torch.tensor([[1] * len(ids) + [0] * (longest_reply - len(ids)) for ids in replies]),
        "advantages": torch.tensor([one for group in by_group(trajectories).values() for one in _advantages(group)]),
        "num_items_in_batch": torch.tensor(sum(map(len, replies))),
    }


def _advantages(group: Sequence[Trajectory]) -> list[float]:
    rewards = np.asarray([member.reward for member in group], np.float32)
    return list(map(float, (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)))


if __name__ == "__main__":
    main(sys.argv[1:])
