"""`[learner]`: the algorithm and the machine it runs on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from forebay.config.section import Address, Natural, Positive, Section

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"]
ObjectiveName = Literal["ppo", "gspo", "cispo"]
CorrectionName = Literal["none", "truncated_is", "icepop", "sequence_mask", "group_expectation", "decoupled"]
Aggregation = Literal["token", "sequence", "fixed"]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]

#: The targets of LoRA that stand for every linear layer.
ALL_LINEAR = "all-linear"

#: What each preset sets; a key that the run file names itself stays as it says.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {
        "estimator": "gae",
        "epochs": 3,
        "minibatch_trajectories": "auto",
        "lr": 3e-6,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "entropy_coef": 0.01,
        "gamma": 0.99,
        "lam": 0.95,
        "max_grad_norm": 1.0,
        "reward_normalize": True,
        "max_kl": 10.0,
    },
}

#: Coefficients that may change while a run goes on (`forebay resume --set`); all else is fixed when it begins.
STEERABLE = frozenset(
    f"learner.{key}"
    for key in (
        "lr", "critic.lr", "critic.value_clip", "kl_coef", "entropy_coef", "max_kl", "clip_low", "clip_high",
        "dual_clip", "importance_cap", "icepop_low", "icepop_high", "sequence_limit", "reward_clip",
    )
)  # fmt: skip


class CriticSection(Section):
    """The critic; there is one when `learner.estimator` is "gae"."""

    path: str | None = Field(
        default=None, description="a language model or a reward model that it starts from; default: [model] path"
    )
    lr: NonNegative = 1e-5
    value_clip: NonNegative = Field(
        default=0.2, description="values move at most this far from the step's first ones; 0: no clipping"
    )


class ReferenceSection(Section):
    """The frozen reference model; there is one when `learner.kl_coef` is above 0."""

    path: str | None = Field(default=None, description="default: [model] path, the weights that the run starts from")
    offload: bool = Field(default=True, description="in host memory while it is not asked")
    address: Address | None = Field(
        default=None, description="where `forebay reference` serves it and the learner asks; none: it is in the learner"
    )


class LoraSection(Section):
    """Adapters of low rank (LoRA, arXiv 2106.09685); where there is no such table, all weights are trained."""

    rank: Positive
    alpha: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="the adapter counts alpha / rank times; default: twice the rank"
    )
    targets: str | list[str] = Field(
        default=ALL_LINEAR,
        description='modules that get an adapter, ["q_proj", "v_proj"]; all-linear: every linear layer but the head',
    )

    @property
    def scaling(self) -> float:
        """What B @ A is multiplied by before it is added to a weight."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank

    def peft_settings(self, base: str) -> dict[str, Any]:
        """What `adapter_config.json` says of an adapter for the model `base`, in peft's words."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": 2 * self.rank if self.alpha is None else self.alpha,
            "lora_dropout": 0.0,
            "target_modules": self.targets,
            "bias": "none",
            "inference_mode": True,
        }

    def contradictions(self) -> Iterator[str]:
        """Targets that are no list of names."""
        if self.targets != ALL_LINEAR and (isinstance(self.targets, str) or not all(self.targets) or not self.targets):
            yield (
                f"learner.lora.targets is {json.dumps(self.targets)}; "
                f'expected "{ALL_LINEAR}" or a list of module names such as ["q_proj", "v_proj"]'
            )


def _as_table(schema: dict[str, Any]) -> None:
    """TOML has no null: a key of a table that may be absent is described by the table alone."""
    schema.update(schema.pop("anyOf")[0])


class LearnerSection(Section):
    """The DeepSpeed learner."""

    connect: Address | None = Field(default=None, description="the buffer; default: [buffer] listen")
    ranks: Positive = Field(
        default=1, description="processes that train together, started on this machine; torchrun may start them instead"
    )
    launcher: Literal["local", "ray"] = Field(
        default="local", description="what starts the ranks: this machine, or the Ray cluster at RAY_ADDRESS"
    )
    sequence_parallel: Positive = Field(
        default=1, description="ranks that share the tokens of each micro-batch, for long sequences; divides ranks"
    )
    cpu_threads: Positive | None = Field(
        default=None, description="computing threads where there is no accelerator; default: half the cores"
    )
    preset: Literal["grpo", "ppo"] = Field(default="grpo", description="defaults for the keys that are not set")
    steps: Positive = 100
    groups_per_step: Positive = Field(default=16, description="B: groups a step")
    group_size: Positive = Field(default=8, description="G: trajectories a group")
    max_staleness: Natural = Field(
        default=4, description="steps; 0 with [publish] every_steps = 1 is the synchronous algorithm"
    )
    stale: Literal["drop", "keep"] = Field(
        default="drop", description="what becomes of groups beyond max_staleness when a batch is composed"
    )
    drop_zero_variance: bool = Field(
        default=False, description="groups whose rewards are all equal are replaced by others (dynamic sampling)"
    )
    drop_overlong: bool = Field(
        default=False, description="groups of which no member ended within max_new_tokens are replaced by others"
    )
    selector: Literal["oldest", "fifo", "freshest", "priority", "uniform"] = Field(
        default="oldest", description="which of the buffered groups a batch takes"
    )
    priority_aging: NonNegative = Field(default=0.1, description="what a waiting group's priority gains a step")
    max_times_sampled: Positive = Field(
        default=1, description="batches that may have the same group (selector uniform only)"
    )
    max_attempts: Positive = Field(
        default=3, description="learners in a row that may die of a batch before its groups are dead letters"
    )

    reward_normalize: bool = Field(default=False, description="rewards minus the batch's mean, by its deviation")
    reward_clip: tuple[float, float] | None = Field(default=None, description="rewards are cut to [low, high]")
    overlong_tokens: Natural = Field(
        default=0, description="the last so many of [sampler] max_new_tokens cost reward, rising to overlong_penalty"
    )
    overlong_penalty: NonNegative = 1.0
    estimator: Estimator = Field(default="grpo", description="how rewards become advantages")
    gamma: Share = Field(default=1.0, description="discount a token (gae, reinforce_pp)")
    lam: Share = Field(default=1.0, description="GAE's lambda")

    epochs: Positive = 1
    minibatches: Positive = Field(default=1, description="optimizer updates an epoch")
    minibatch_trajectories: Positive | Literal["auto"] | None = Field(
        default=None,
        description="trajectories an update instead of minibatches; auto: 1024, and 512 from 10 B parameters on",
    )
    objective: ObjectiveName = "ppo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        default=None, description="bound of the ratio where the advantage is negative; none: no bound"
    )
    correction: CorrectionName = Field(
        default="truncated_is", description="how experience of older weights is weighted"
    )
    uncorrected: bool = Field(
        default=False, description='says a second time that correction = "none" is meant although max_staleness > 0'
    )
    importance_cap: Annotated[float, Field(ge=1)] = Field(
        default=2.0, description="truncated importance sampling: per-token learner/behaviour ratio is cut here"
    )
    icepop_low: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5, description="tokens whose learner/behaviour ratio is below are masked (icepop)"
    )
    icepop_high: Annotated[float, Field(ge=1)] = Field(default=5.0, description="and those above this")
    sequence_limit: Annotated[float, Field(gt=1)] = Field(
        default=2.0, description="sequences whose mean learner/behaviour ratio is outside [1/x, x] are masked"
    )
    loss_aggregation: Aggregation = Field(
        default="token", description="what weighs the same: every token, every sequence, or tokens over loss_divisor"
    )
    loss_divisor: Positive | None = Field(
        default=None, description="tokens that a sequence counts for (fixed only); default: [sampler] max_new_tokens"
    )
    entropy_coef: NonNegative = 0.0
    kl_coef: NonNegative = Field(default=0.0, description="weight of the KL to the reference model; 0: none is loaded")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="k2 or k3 in the loss (the gradient of k1 is 0 on average); k1 in the reward"
    )
    kl_in: Literal["loss", "reward"] = "loss"
    max_kl: Annotated[float, Field(gt=0)] = Field(
        default=10.0, description="mean KL to the behaviour policy above which the run pauses"
    )
    degenerate_steps: Positive = Field(
        default=10, description="steps in a row without one group that tells its members apart, before an alarm"
    )

    lr: NonNegative = 1e-6
    lr_warmup_steps: Natural = 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: NonNegative = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    compute_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16",
        description="of forward and backward; masters and moments are float32 (float16: loss scaling)",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="in which gradients are summed, over micro-batches and ranks"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1, description="what ranks share out: 1 optimizer state, 2 and gradients, 3 and weights"
    )
    gradient_checkpointing: bool = False
    offload_optimizer: bool = Field(
        default=False, description="masters and moments in host memory, updated there (ZeRO 1 to 3)"
    )
    tokens_per_microbatch: Positive = 8192
    checkpoint_every_steps: Positive = 10
    keep_checkpoints: Positive = 2
    critic: CriticSection = Field(default_factory=CriticSection)
    reference: ReferenceSection = Field(default_factory=ReferenceSection)
    lora: LoraSection | None = Field(default=None, description="train adapters alone", json_schema_extra=_as_table)
    deepspeed: dict[str, Any] = Field(default_factory=dict, description="any DeepSpeed setting")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = PRESETS.get(str(given.get("preset", "grpo")), {})
        if "minibatches" in given:
            preset = {key: value for key, value in preset.items() if key != "minibatch_trajectories"}
        return {**preset, **given}

    def contradictions(self) -> Iterator[str]:
        """Settings that do not go together, one line each."""
        if self.correction == "none" and self.max_staleness and not self.uncorrected:
            yield (
                f'learner.correction is "none", but learner.max_staleness is {self.max_staleness}: experience of older '
                'weights would be trained as if it were new; expected a correction ("truncated_is"), '
                "max_staleness = 0, or learner.uncorrected = true to say it twice"
            )
        if self.uncorrected and self.correction != "none":
            yield f'learner.uncorrected is true, but learner.correction is "{self.correction}"; expected "none"'
        if self.ranks % self.sequence_parallel and self.ranks > 1:
            yield (
                f"learner.sequence_parallel is {self.sequence_parallel}; expected a divisor of learner.ranks "
                f"({self.ranks})"
            )
        if self.offload_optimizer and self.zero_stage == 0 and self.compute_dtype == "float32":
            yield "learner.offload_optimizer is true, but learner.zero_stage is 0; expected 1, 2 or 3"
        if self.minibatch_trajectories is not None and self.minibatches > 1:
            yield "learner.minibatches and learner.minibatch_trajectories are both set; expected one of them"
        if self.reduce_dtype != "float32" and self.reduce_dtype != self.compute_dtype:
            yield (
                f'learner.reduce_dtype is "{self.reduce_dtype}", but learner.compute_dtype is "{self.compute_dtype}"; '
                'expected "float32", or both the same'
            )
        if self.loss_divisor is not None and self.loss_aggregation != "fixed":
            yield f'learner.loss_divisor is set, but loss_aggregation is "{self.loss_aggregation}"; expected "fixed"'
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            yield f"learner.reward_clip is {list(self.reward_clip)}; expected [low, high] with low below high"
        if self.minibatches > self.groups_per_step:
            yield (
                f"learner.minibatches is {self.minibatches}; expected at most learner.groups_per_step "
                f"({self.groups_per_step}): a group is never split"
            )
        yield from self.lora.contradictions() if self.lora else ()
