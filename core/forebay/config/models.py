"""The run file: one frozen pydantic model a section. Defaults here are the product's defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from forebay.config.learner_section import LearnerSection
from forebay.config.reward_section import RewardSection, model_mistakes
from forebay.config.section import Address, Natural, Positive, Section

#: Keys that two services of one run may set differently: where they run, not what they learn.
LOCAL_KEYS = frozenset(
    {
        "run.folder",
        "buffer",
        "sampler.connect",
        "sampler.fleet",
        "sampler.region",
        "sampler.id",
        "sampler.cpu_threads",
        "sampler.engine",
        "sampler.concurrent_groups",
        "sampler.frame_linger_s",
        "learner.connect",
        "learner.cpu_threads",
        "learner.ranks",
        "learner.launcher",
        "learner.sequence_parallel",
        "learner.zero_stage",
        "learner.gradient_checkpointing",
        "learner.offload_optimizer",
        "learner.tokens_per_microbatch",
        "learner.keep_checkpoints",
        "learner.deepspeed",
        "learner.reference.address",
        "learner.reference.offload",
        "publish.difference",
        "publish.store",
        "publish.skip_deltas",
        "reward.patience_s",
        "reward.models.*.address",
        "reward.models.*.http",
        "reward.models.*.device",
        "reward.models.*.tokens_per_batch",
        "reward.models.*.gather_s",
        "reward.models.*.timeout_s",
        "fleet",
        "observe",
        "security",
    }
)

#: vLLM settings that forebay owns, and why.
OWNED_ENGINE_KEYS = {
    "model": "set [model] path",
    "tokenizer": "set [model] tokenizer",
    "seed": "seeds come from (run seed, group, member)",
    "logprobs_mode": "importance ratios need processed_logprobs",
    "weight_transfer_config": "weights arrive through forebay's own engine",
    "worker_extension_cls": "forebay guards the worker with its own extension",
}

#: DeepSpeed settings that forebay owns, and why.
OWNED_DEEPSPEED_KEYS = {
    "train_batch_size": "batches are leased: set [learner] groups_per_step and group_size",
    "train_micro_batch_size_per_gpu": "micro-batches are sized by tokens: set [learner] tokens_per_microbatch",
    "gradient_accumulation_steps": "micro-batches are sized by tokens: set [learner] tokens_per_microbatch",
    "gradient_clipping": "set [learner] max_grad_norm",
    "optimizer": "set [learner] lr, betas, weight_decay",
    "bf16": "set [learner] compute_dtype",
    "fp16": "set [learner] compute_dtype",
    "data_types": "set [learner] reduce_dtype",
    "communication_data_type": "set [learner] reduce_dtype",
}


class RunSection(Section):
    """Identity of the run and where this machine keeps its part of it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    folder: Path | None = Field(default=None, description="everything this machine keeps of the run; default runs/NAME")
    seed: int = 0

    @property
    def home(self) -> Path:
        """The run folder, `runs/NAME` unless set."""
        return self.folder if self.folder is not None else Path("runs") / self.name


class ModelSection(Section):
    """The model that is trained."""

    path: str = Field(description="Hugging Face name or local checkpoint folder")
    tokenizer: str | None = Field(default=None, description="where the tokenizer is, when not with the model")
    make: str | None = Field(
        default=None, description="module:function(folder, seed) that makes the checkpoint at `path` when it is missing"
    )


class TaskSection(Section):
    """What is learned. `name` is `reasoning-gym:TASK`, `jsonl:FILE` or `package.module:factory`."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict, description="passed to the task")
    train_prompts: Positive = 2000
    epochs: Natural = Field(default=0, description="passes over the prompts at most; 0: as many as the steps need")
    heldout_prompts: Natural = 200
    system_prompt: str = ""
    prompt_template: str = Field(default="{prompt}", description="the user's message; {prompt} is the task's question")
    chat: bool = Field(default=True, description="apply the tokenizer's chat template; false: the text as it is")
    answer_pattern: str | None = Field(
        default=None, description="regular expression whose last match (group 1 if any) in the reply is the answer"
    )
    reward_timeout_s: Annotated[float, Field(gt=0)] = 10.0


class BufferSection(Section):
    """The buffer service."""

    listen: Address = "127.0.0.1:7070"
    http: Address = "127.0.0.1:7071"
    member_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=20.0, description="without a heartbeat: lost, permits go to others"
    )
    max_streams: Positive = Field(default=4096, description="append streams open at once")
    max_trajectories: Positive = Field(
        default=4_000_000, description="trajectories buffered at most; then appends are pushed back"
    )
    memory_mb: Positive = Field(default=256, description="bytes of frames held in memory at most")
    disk_gb: Annotated[float, Field(gt=0)] = Field(
        default=50.0, description="journal and weights at most; then appends are pushed back"
    )
    segment_mb: Positive = Field(default=256, description="size of the journal's files")
    retain_gb: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="trained experience kept for replay at most; it gives way when room is needed"
    )
    retain_hours: Annotated[float, Field(ge=0)] = Field(default=168.0, description="and not longer than this")
    permit_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=3600.0, description="a group that takes longer is granted to another sampler"
    )
    keep_anchors: Positive = Field(default=2, description="weight versions older than this many anchors are deleted")


class SamplerSection(Section):
    """A vLLM sampler."""

    connect: Address | None = Field(default=None, description="the buffer; default: [buffer] listen")
    id: str | None = Field(default=None, description="default: host name and a random part")
    fleet: str = "local"
    region: str = "local"
    concurrent_groups: Positive = Field(default=16, description="groups generating at once")
    frame_linger_s: Annotated[float, Field(ge=0)] = Field(
        default=0.05, description="finished groups wait this long for company in a frame"
    )
    logprobs: Literal["exact", "compact"] = Field(
        default="exact", description="how log-probabilities travel; compact: smaller frames, off by at most 2^-8"
    )
    max_new_tokens: Positive = 256
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stop: list[str] = Field(default_factory=list)
    attempts: Positive = Field(
        default=2, description="tries at a failed generation or reward before the group is dropped"
    )
    group_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0, description="a group older than this is aborted and dropped"
    )
    in_flight: Literal["recompute", "keep"] = Field(
        default="recompute",
        description="replies that new weights interrupt: their cached keys and values are computed anew, so that every "
        "token is of one version; keep: they go on with the old ones, which costs no time",
    )
    reward_workers: Positive = 1
    cpu_threads: Positive | None = Field(
        default=None, description="computing threads where there is no accelerator; default: half the cores"
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="any vLLM engine argument")


class PublishSection(Section):
    """How weights leave the learner."""

    every_steps: Positive = 1
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    codec: Literal["gaps", "classes"] = Field(
        default="gaps", description="classes: about 0.6 of the bytes for twice the work, for slow links"
    )
    difference: Literal["host", "device"] = Field(
        default="host", description="device: keep what was published there, too, and copy only what has changed"
    )
    anchor_every: Positive = Field(default=50, description="publications between two full snapshots")
    store: str = Field(
        default="",
        description="a folder or s3://bucket/prefix for weights, each run in its own part; default: run folder",
    )
    skip_deltas: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        default=(8, 64), description="the buffer merges so many deltas into one, for samplers that are behind"
    )


class FleetSection(Section):
    """What `forebay run` starts on this machine."""

    samplers: Positive = 1
    max_restarts: Natural = Field(default=3, description="a service that dies more often ends the run")


class ObserveSection(Section):
    """What is measured and shown."""

    eval_every_steps: Natural = Field(
        default=0, description="held-out evaluation between start and end; 0: only these two"
    )
    plot: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class SecuritySection(Section):
    """What protects the wire."""

    insecure: bool = Field(
        default=False, description="allow listening beyond loopback without TLS (a trusted network only)"
    )


class RunFile(Section):
    """A whole run file, resolved."""

    run: RunSection
    model: ModelSection
    task: TaskSection
    buffer: BufferSection = Field(default_factory=BufferSection)
    sampler: SamplerSection = Field(default_factory=SamplerSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    learner: LearnerSection = Field(default_factory=LearnerSection)
    publish: PublishSection = Field(default_factory=PublishSection)
    fleet: FleetSection = Field(default_factory=FleetSection)
    observe: ObserveSection = Field(default_factory=ObserveSection)
    security: SecuritySection = Field(default_factory=SecuritySection)

    @model_validator(mode="before")
    @classmethod
    def _reward_models(cls, given: Any) -> Any:
        for mistake in model_mistakes(given):
            raise ValueError(mistake)
        return given

    @model_validator(mode="after")
    def _consistent(self) -> RunFile:
        if self.learner.max_staleness < self.publish.every_steps - 1:
            raise ValueError(
                f"learner.max_staleness is {self.learner.max_staleness}, but with publish.every_steps = "
                f"{self.publish.every_steps} the learner would wait for ever; "
                f"expected at least {self.publish.every_steps - 1}"
            )
        for contradiction in (*self.learner.contradictions(), *self.reward.contradictions()):
            raise ValueError(contradiction)
        self._check_sampling()
        for section, keys, owned in (
            ("sampler.engine", self.sampler.engine, OWNED_ENGINE_KEYS),
            ("learner.deepspeed", self.learner.deepspeed, OWNED_DEEPSPEED_KEYS),
        ):
            for key in keys:
                if key in owned:
                    raise ValueError(f"{section}.{key} is forebay's own: {owned[key]}")
        return self

    def _check_sampling(self) -> None:
        times = self.learner.max_times_sampled
        if times > 1 and self.learner.selector != "uniform":
            raise ValueError(
                f"learner.max_times_sampled is {times}, but learner.selector is {self.learner.selector!r}; "
                "expected 1, or the selector uniform"
            )
        if times > self.learner.max_staleness + 1:
            raise ValueError(
                f"learner.max_times_sampled is {times}, but with learner.max_staleness = {self.learner.max_staleness} "
                f"no group lives that many steps; expected at most {self.learner.max_staleness + 1}"
            )

    @property
    def sampler_target(self) -> str:
        """Address of the buffer that a sampler of this run file dials."""
        return self.sampler.connect or self.buffer.listen

    @property
    def learner_target(self) -> str:
        """Address of the buffer that the learner of this run file dials."""
        return self.learner.connect or self.buffer.listen
