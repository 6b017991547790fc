"""Every setting of a run, with its type, default and rule.

A config is a YAML file plus `key=value` overrides. It is strict: an unknown key or a wrong value
is an error that names the key, the rule and the nearest valid key; all errors come at once. The
defaults are the published PNPO configuration (1.5B model, 16k context) where the paper gives one.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator


def _refuse_bool(value: Any) -> Any:
    """YAML's yes and true are no numbers, although Python counts with them."""
    if isinstance(value, bool):
        raise ValueError("must be a number")  # pydantic adds the key and the value
    return value


Count = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]  # of a moving average
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # of a file or a folder


class ConfigError(ValueError):
    """One or more settings are wrong; the message lists every one of them with its cure."""


class Section(BaseModel):
    """A group of settings: immutable, without unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


class RunSection(Section):
    """Where the run is kept and whether it continues an earlier one."""

    dir: str = "runs"
    name: Name | None = None
    # null: the config file's name and the time
    # never: refuse an existing run; auto: continue it from its last checkpoint, or begin it
    resume: Literal["never", "auto"] = "never"


class ModelSection(Section):
    """The model to train: a Hugging Face folder with config, safetensors and tokenizer."""

    path: str = ""
    reference: str | None = None  # the frozen policy of objective.kl; null: `path` itself
    # null: in bfloat16 on CUDA, wherever Transformer Engine is installed; false: never
    transformer_engine: bool | None = None
    fp8: Literal["tensorwise", "blockwise"] | None = None  # of the layers' matrix products


class DataSection(Section):
    """Training prompts: parquet in the schema of DAPO-Math-17k."""

    train: str = ""
    max_prompt_tokens: Count = 1024


class ParallelSection(Section):
    """The actor's layout; tensor * pipeline * context * data = number of processes."""

    tensor: Count = 1
    pipeline: Count = 1
    context: Count = 1
    data: Count | None = None  # null: follows from the number of processes
    expert: Count = 1  # of a mixture of experts: divides context * data
    virtual_stages: Count = 1  # model chunks per pipeline stage, interleaved
    sequence: bool = True  # sequence parallelism wherever tensor > 1

    @property
    def model_size(self) -> int:
        """Processes of one data-parallel replica."""
        return self.tensor * self.pipeline * self.context


class RolloutSection(Section):
    """What is generated in each step and how the engine runs."""

    tensor: Count = 1  # vLLM's tensor parallel size; data parallel over the rest
    expert_parallel: bool = False  # whole experts on each rank of an engine; on CUDA
    prompts: Count = 256
    responses_per_prompt: Annotated[int, Field(ge=2)] = 8
    max_response_tokens: Count = 15360
    # There is no top_p: ratios are to the whole distribution, which it would not sample from.
    temperature: Positive = 1.0
    max_sequences: Count = 256  # that one engine generates at once
    memory_fraction: Fraction = 0.5  # of the device, on CUDA
    kv_cache_mib: Count = 256  # on CPU
    time_limit_seconds: Positive = 7200.0  # for generating one rollout batch, or one evaluation set


class RewardSection(Section):
    """How responses are judged."""

    # `module:function` of a megatron_rl.rewards.verifier.Verifier
    verifier: str = "megatron_rl.rewards.math_answer:verify_math_answer"
    workers: Count = 1  # processes per rank
    time_limit_seconds: Positive = 5.0


class AdvantageSection(Section):
    """How rewards become advantages."""

    estimator: Literal["group_relative", "leave_one_out", "batch_baseline", "optimal_value"] = (
        "group_relative"
    )
    std: Literal["sample", "population", "none"] = "sample"  # of group_relative, batch_baseline
    beta: Positive = 1.0  # of optimal_value (OAPL), in units of reward


class ObjectiveSection(Section):
    """A named objective; further keys override its axes (`docs/objectives.md` lists them)."""

    model_config = ConfigDict(extra="allow")

    name: str = "pnpo"

    @property
    def overrides(self) -> dict[str, Any]:
        """What the config changes of the named objective."""
        return dict(self.model_extra or {})


class OptimizerSection(Section):
    """AdamW, its warm-up counted in rollout batches as the paper counts steps."""

    learning_rate: Positive = 1.0e-6
    min_learning_rate: NonNegative = 0.0
    warmup_steps: NonNegative = 10.0  # rollout batches; a part of one is rounded to updates
    decay: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NonNegative = 0.1
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Positive = 1.0e-8
    clip_grad: NonNegative = 1.0


class TrainerSection(Section):
    """The regime: steps, reuse of each rollout batch, micro-batches, checkpoints."""

    steps: Count = 150  # rollout batches
    epochs: Count = 4  # passes over each rollout batch
    minibatches: Count = 4  # optimizer updates per epoch
    tokens_per_micro_batch: Count = 32768  # the packing budget of one forward
    recompute: Literal["none", "selective", "full"] = "none"
    checkpoint_every: Count = 10  # steps; the last step is always kept
    keep_checkpoints: Count = 2
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA


class EvalSection(Section):
    """Held-out evaluation: Avg@samples, before, during and after training."""

    sets: dict[Name, str] = Field(default_factory=dict)  # name: parquet file
    every: Count = 10
    samples: Count = 32
    temperature: Positive = 0.7
    top_p: Fraction = 0.9


class WandbSection(Section):
    """Weights & Biases, used only where a project is named."""

    project: str
    entity: str | None = None


class ReshardingSection(Section):
    """How weights reach the engine, and how closely that is watched."""

    bucket_mib: Count = 64  # what a rank sends plus receives in one round
    full_check_every: Annotated[int, Field(ge=0)] = 50  # pushes; every push compares checksums
    repair: bool = False  # after a mismatch push everything again, instead of stopping
    time_limit_seconds: Positive = 300.0  # for one round


class LoggingSection(Section):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    wandb: WandbSection | None = None


class Config(Section):
    """A whole run."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 42
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    parallel: ParallelSection = ParallelSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    advantage: AdvantageSection = AdvantageSection()
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection = OptimizerSection()
    trainer: TrainerSection = TrainerSection()
    resharding: ReshardingSection = ReshardingSection()
    eval: EvalSection = EvalSection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="after")
    def _check(self) -> "Config":
        problems = []
        if not self.model.path:
            problems.append("model.path: missing; name a Hugging Face model folder")
        if not self.data.train:
            problems.append("data.train: missing; name a parquet file of prompts")
        if self.rollout.prompts % self.trainer.minibatches:
            problems.append(
                f"rollout.prompts={self.rollout.prompts} cannot be split into "
                f"trainer.minibatches={self.trainer.minibatches} equal minibatches; "
                "make prompts a multiple of minibatches"
            )
        if self.optimizer.min_learning_rate > self.optimizer.learning_rate:
            problems.append(
                "optimizer.min_learning_rate is above optimizer.learning_rate; lower it"
            )
        problems += self._unread()
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _unread(self) -> list[str]:
        """Values that nothing reads beside the others: whoever set one expects an effect."""
        advantage, optimizer, problems = self.advantage, self.optimizer, []
        estimator = f"advantage.estimator={advantage.estimator}"
        if advantage.std != "sample" and advantage.estimator in ("leave_one_out", "optimal_value"):
            problems.append(f"advantage.std={advantage.std}: {estimator} divides by none; unset it")
        if advantage.beta != 1.0 and advantage.estimator != "optimal_value":
            problems.append(f"advantage.beta={advantage.beta}: {estimator} has no beta; unset it")
        if optimizer.min_learning_rate and optimizer.decay == "constant":
            problems.append(
                f"optimizer.min_learning_rate={optimizer.min_learning_rate}: a constant rate never "
                "comes down to it; unset it, or set optimizer.decay"
            )
        return problems

    @property
    def reference_path(self) -> str:
        """The folder of the reference policy, where the objective has a KL term."""
        return self.model.reference or self.model.path

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates between two weight pushes."""
        return self.trainer.epochs * self.trainer.minibatches

    @property
    def warmup_updates(self) -> int:
        """Optimizer updates until the learning rate is the full one."""
        return round(self.optimizer.warmup_steps * self.updates_per_step)

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus longest response."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """The config in a YAML file with `key.path=value` overrides applied.

    Raises ConfigError listing every wrong key and value.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist; give the path of a YAML file")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, not a {type(values).__name__}")
    for override in overrides or []:
        apply_override(values, override)
    return parse_config(values)


def parse_config(values: dict[str, Any]) -> Config:
    """A Config from nested plain values; raises ConfigError listing every wrong key and value."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = [_explain(item) for item in error.errors()]
        raise ConfigError("wrong config:\n  " + "\n  ".join(problems)) from None


def dump_config(config: Config) -> str:
    """The resolved config as YAML that `load_config` reads back to the same Config."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def valid_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the config, in order."""
    keys = []
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        keys += valid_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return keys


def _section_of(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def apply_override(values: dict[str, Any], override: str) -> None:
    """Put `key.path=value` into nested plain values; ConfigError where it is not of that form."""
    key, equals, text = override.partition("=")
    parts = key.strip().lstrip("-").split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form key=value, as in seed=7")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
    inner = values
    for part in parts[:-1]:
        if not isinstance(inner.get(part), dict):
            inner[part] = {}
        inner = inner[part]
    inner[parts[-1]] = value


def _explain(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key{_suggest(key)}"
    if item["type"] == "value_error" and not key:
        return str(item["ctx"]["error"]).replace("\n", "\n  ")
    return f"{key}={item['input']!r}: {item['msg'].lower()}"


def _suggest(key: str) -> str:
    section, _, last = key.rpartition(".")
    siblings = [name for name in valid_keys() if section and name.startswith(f"{section}.")]
    if siblings:
        words = {name.removeprefix(f"{section}."): name for name in siblings}
        near = [words[word] for word in difflib.get_close_matches(last, words, n=1)]
    else:
        near = difflib.get_close_matches(key, [*Config.model_fields, *valid_keys()], n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; valid here: {', '.join(siblings or Config.model_fields)}"
