"""The obvious alternative: TRL's GRPO trainer, one synchronous loop of generate and train on the same machine.

`python -m benchmarks.peer_trl RUNFILE... --steps N [--flags of the run file]` trains the run file's model on its task
with its group size, groups a step, updates a step, learning rate, temperature and reply length, and prints one JSON
object: figures of a step each. Generation is transformers' own, in the trainer's process: what TRL does when it is
given a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from forebay.cli.arguments import add_run_files, load_run, split_dotted
from forebay.cli.threads import settle_own_threads
from forebay.config.models import RunFile


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStep:
    """One step of the synchronous loop: seconds, what was trained in it, and the sampled reward."""

    wall_s: float
    generate_s: float
    trajectories: int
    generated_tokens: int
    reward_mean: float


class Stopwatch:
    """Sums the wall time and the output of the trainer's generation calls, and the rewards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self._generate_s = 0.0
        self._tokens = 0
        self._rewards: list[float] = []

    def generated(self, seconds: float, tokens: int) -> None:
        """A generation call is over."""
        self._generate_s += seconds
        self._tokens += tokens

    def rewarded(self, rewards: list[float]) -> None:
        """Replies were scored."""
        self._rewards += rewards

    def lap(self) -> PeerStep:
        """The step that ends now; the next one starts."""
        now = self._clock()
        count = len(self._rewards)
        step = PeerStep(
            wall_s=now - self._started_s,
            generate_s=self._generate_s,
            trajectories=count,
            generated_tokens=self._tokens,
            reward_mean=sum(self._rewards) / max(1, count),
        )
        self._started_s, self._generate_s, self._tokens, self._rewards = now, 0.0, 0, []
        return step


def main(argv: list[str]) -> int:
    """Train and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_trl", description=__doc__)
    add_run_files(parser)
    parser.add_argument("--steps", type=int, required=True, help="steps of the run file's batch size")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="weights and compute")
    rest, dotted = split_dotted(argv)
    arguments = parser.parse_args(rest)
    arguments.dotted = dotted
    settle_own_threads(alone=True)  # before torch; a loop by itself has all cores
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    steps = train(load_run(arguments), arguments.steps, arguments.dtype)
    print(json.dumps({"dtype": arguments.dtype, "steps": [asdict(step) for step in steps]}))
    return 0


def train(run: RunFile, steps: int, dtype: str) -> list[PeerStep]:
    """`steps` steps of TRL's trainer, and how each went."""
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from forebay.config.model_source import model_source

    watch = Stopwatch()
    done: list[PeerStep] = []

    class Timed(GRPOTrainer):  # type: ignore[misc]  # TRL is not typed
        """The trainer with its generation timed."""

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            answer = super()._generate_single_turn(*args, **kwargs)
            watch.generated(time.monotonic() - started, sum(map(len, answer[0])))
            return answer

    class Laps(TrainerCallback):  # type: ignore[misc]
        """Ends a step of ours after as many optimizer updates as it has."""

        def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
            watch.lap()

        def on_step_end(self, _args: Any, state: Any, *_rest: Any, **_kwargs: Any) -> None:
            if state.global_step % updates_per_step(run) == 0:
                done.append(watch.lap())
                print(f"peer: step {len(done)} of {steps}: {done[-1]}", file=sys.stderr, flush=True)

    model = model_source(run.model, run.run.seed)
    tokenizer = AutoTokenizer.from_pretrained(run.model.tokenizer or model, padding_side="left")
    with tempfile.TemporaryDirectory(prefix="forebay-peer-") as scratch:
        trainer = Timed(
            model=model,
            args=configuration(run, steps, dtype, scratch),
            processing_class=tokenizer,
            train_dataset=dataset(run, steps),
            reward_funcs=rewarder(run, watch),
            callbacks=[Laps()],
        )
        trainer.train()
    return done


def updates_per_step(run: RunFile) -> int:
    """Optimizer updates a step."""
    return run.learner.epochs * run.learner.minibatches


def configuration(run: RunFile, steps: int, dtype: str, scratch: str) -> Any:
    """TRL's configuration for the run file's algorithm; what slows it without need is off."""
    from trl import GRPOConfig

    learner, sampler = run.learner, run.sampler
    trajectories = learner.groups_per_step * learner.group_size
    return GRPOConfig(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": dtype},
        gradient_checkpointing=learner.gradient_checkpointing,
        per_device_train_batch_size=trajectories // learner.minibatches,
        steps_per_generation=learner.minibatches,
        num_iterations=learner.epochs,
        num_generations=learner.group_size,
        max_completion_length=sampler.max_new_tokens,
        temperature=sampler.temperature,
        top_p=sampler.top_p,
        generation_kwargs={"stop_strings": list(sampler.stop)} if sampler.stop else None,
        max_steps=steps * updates_per_step(run),
        learning_rate=learner.lr,
        lr_scheduler_type="constant",
        adam_beta1=learner.betas[0],
        adam_beta2=learner.betas[1],
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        epsilon=learner.clip_low,
        epsilon_high=learner.clip_high,
        beta=0.0,
        loss_type="dapo",  # every token weighs the same, as in ours
        seed=run.run.seed,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


def dataset(run: RunFile, steps: int) -> Any:
    """The run file's training questions in the order of its group ids, as TRL wants them."""
    from datasets import Dataset

    from forebay.sampler.tasks.load import load_task
    from forebay.sampler.tasks.order import prompt_index

    train = load_task(run.task, run.run.seed).train
    groups = min(len(train), (steps + 1) * run.learner.groups_per_step)
    indices = [prompt_index(group, len(train), run.run.seed) for group in range(groups)]
    return Dataset.from_list([{"prompt": prompt(run, train[index].text), "index": index} for index in indices])


def prompt(run: RunFile, question: str) -> Any:
    """Messages for a chat model, text otherwise."""
    message = run.task.prompt_template.replace("{prompt}", question)
    if not run.task.chat:
        return run.task.system_prompt + message
    system = [{"role": "system", "content": run.task.system_prompt}] if run.task.system_prompt else []
    return [*system, {"role": "user", "content": message}]


def rewarder(run: RunFile, watch: Stopwatch) -> Callable[..., list[float]]:
    """The task's own scores, computed in the loop."""
    from forebay.sampler.tasks.answers import AnswerExtractor
    from forebay.sampler.tasks.load import load_task

    task = load_task(run.task, run.run.seed)
    extract = AnswerExtractor(run.task.answer_pattern, run.sampler.stop)

    def reward(completions: list[Any], index: list[int], **_columns: Any) -> list[float]:
        replies = [reply if isinstance(reply, str) else reply[-1]["content"] for reply in completions]
        scores = [task.score(task.train[which], extract(reply)) for which, reply in zip(index, replies, strict=True)]
        watch.rewarded([score.reward for score in scores])
        return [score.reward for score in scores]

    return reward


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
