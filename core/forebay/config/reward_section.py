"""`[reward]`: what a reply is worth: the task's own score and reward models, and how much each counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from forebay.config.section import Address, Positive, Section
from forebay.config.toml_text import toml_value

#: The part of a trajectory's reward that the task itself gave; no model may be called so.
RULE = "rule"
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")]
Seconds = Annotated[float, Field(gt=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class RewardModelSection(Section):
    """`[reward.models.NAME]`: one reward model, its service, and what its score counts."""

    path: str = Field(description="Hugging Face name or local folder of a sequence classifier with one label")
    make: str | None = Field(
        default=None, description="module:function(folder, seed) that makes the model at `path` when it is missing"
    )
    engine: Literal["transformers", "vllm"] = Field(
        default="transformers", description="what runs the model; vllm: its pooling engine, in the same process"
    )
    address: Address = Field(description="where `forebay reward` serves it and samplers ask")
    http: Address | None = Field(default=None, description="health and metrics of the service; none: not served")
    weight: Finite = Field(default=1.0, description="what the score counts in the reward; 0: it is only recorded")
    chat: bool | None = Field(
        default=None, description="apply the reward model's own chat template; default: if it has one"
    )
    max_tokens: Positive | None = Field(
        default=None, description="prompt and reply together; a longer one is an error. Default: what the model takes"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="of the weights; auto: as they are stored"
    )
    device: str | None = Field(default=None, description="such as cuda:1 or cpu; default: the first accelerator")
    tokens_per_batch: Positive = Field(default=16_384, description="in one forward pass, padding included")
    gather_s: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.005, description="an idle model waits this long for company for what has come"
    )
    timeout_s: Seconds = Field(default=30.0, description="a sampler waits this long for one answer, then asks again")


class RewardSection(Section):
    """How rewards come about."""

    rule_weight: Finite = Field(
        default=1.0, description="what the task's own score counts; 0: it is not even asked for in training"
    )
    patience_s: Seconds = Field(
        default=60.0, description="a score is tried for so long before its group is dropped; never scored 0"
    )
    heldout: Literal["rule", "reward"] = Field(
        default="rule", description="what a held-out reply scores: the task's own score, or the whole reward"
    )
    models: dict[Name, RewardModelSection] = Field(default_factory=dict)

    def contradictions(self) -> Iterator[str]:
        """Settings that do not go together, one line each."""
        if self.rule_weight == 0 and not any(model.weight for model in self.models.values()):
            yield (
                "reward.rule_weight is 0 and no reward model counts: every reward would be 0; "
                "expected a reward.rule_weight other than 0, or a [reward.models.NAME] with a weight"
            )
        for name, model in self.models.items():
            if model.engine == "vllm" and model.device is not None:
                yield (
                    f"reward.models.{name}.device is {toml_value(model.device)}, but vLLM chooses its device itself; "
                    'expected CUDA_VISIBLE_DEVICES in the environment, or engine = "transformers"'
                )
        owners: dict[str, str] = {}
        for name, model in self.models.items():
            for key, address in (("address", model.address), ("http", model.http)):
                here = f"reward.models.{name}.{key}"
                if address is not None and owners.setdefault(address, here) != here:
                    yield f"{here} and {owners[address]} are both {address}; expected one address each"


def model_mistakes(given: Any) -> Iterator[str]:
    """What is wrong with the tables below `reward.models` of a run file that is not validated yet, a line each.

    Their names are the user's, so that the run file's own words for mistakes, which go by known keys, end above them.
    """
    reward = given.get("reward") if isinstance(given, Mapping) else None
    models = reward.get("models") if isinstance(reward, Mapping) else None
    for name, table in models.items() if isinstance(models, Mapping) else ():
        if name == RULE:
            yield f"reward.models.{RULE} is the name of the task's own score; expected another name"
        try:
            RewardSection.model_validate({"models": {name: table}})
        except ValidationError as error:
            yield _told(name, table, min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden"))


def _told(name: str, table: Any, problem: Any) -> str:
    from forebay.config.keys import KeyTree  # it imports the run file's models, which import this

    keys, here, inner = KeyTree(RewardModelSection.model_json_schema()), f"reward.models.{name}", problem["loc"][2:]
    if inner[:1] == ("[key]",):
        return f"{here}: expected a name of letters, digits, - and _"
    if not inner:
        return f"{here} is {toml_value(table)}; expected a table with path, address"
    key = str(inner[0])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {here}.{key}; {keys.suggestion((key,))}"
    if problem["type"] == "missing":
        return f"key {here}.{key} is missing; expected {keys.expected((key,))}"
    return f"{here}.{key} is {toml_value(table[key])}; expected {keys.expected((key,))}"
