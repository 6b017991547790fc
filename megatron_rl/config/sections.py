"""The sections of a config: each setting with its type, default and rule.

Defaults follow the published PNPO configuration (1.5B model, 16k context) where the paper gives
one. `tools/reference_pages.py` generates `docs/configuration.md` from the docstrings.

A setting whose type is `PathText` is a path: it is expanded when it is validated, on the machine
on which the command was started, and `with_absolute_paths` makes it absolute.
"""

import os
import re
from dataclasses import dataclass
from datetime import date, datetime
from types import NoneType
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from megatron_rl.objectives.named import Spec, choose_objective
from megatron_rl.objectives.spec import FUNCTION

# OWNER/NAME or OWNER/NAME@REVISION on the Hugging Face hub; a relative path may look like one
HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w.-]+))?")
_VARIABLE_IN_PATH = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([^}]*)\})")
_IS_PATH = object()  # in the metadata of a setting


def expand_path(text: str) -> str:
    """Replace `~`, `~user`, `$NAME` and `${NAME}` as a shell does.

    Raises ValueError for a variable that is not set or empty, for another form of `${...}` and for
    an unknown user. The `$` in the name of an existing file is left as it is.
    """
    if text.startswith("~"):
        expanded = os.path.expanduser(text)
        if expanded.startswith("~"):
            raise ValueError(
                f"there is no home folder of {text.partition('/')[0]}; give the path in full, or "
                "./ in front of a name that begins with ~"
            )
        text = expanded
    return text if "$" not in text or os.path.lexists(text) else _VARIABLE_IN_PATH.sub(_value, text)


def _value(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError(f"{match[0]} is not replaced in paths, only $NAME and ${{NAME}}")
    if not (value := os.environ.get(name)):
        raise ValueError(
            f"the environment variable {name} is not set or empty; export it, or give the path in "
            "full"
        )
    return value


PathText = Annotated[str, AfterValidator(expand_path), _IS_PATH]


def _check_paths(value: Any) -> Any:
    texts = [one for pair in value.items() for one in pair] if isinstance(value, dict) else [value]
    if value == {} or not all(isinstance(one, str) for one in texts):
        raise ValueError("must be a path, or a mapping of data sources to paths")
    return value


def _expand_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: expand_path(path) for name, path in value.items()}
    return expand_path(value)


# One path, or one for each data source.
PathTexts = Annotated[
    str | dict[str, str], BeforeValidator(_check_paths), AfterValidator(_expand_paths), _IS_PATH
]


def is_path(annotation: Any, metadata: list[Any]) -> bool:
    """Return True for `PathText` and for `PathText | None`."""
    kinds = (annotation, *get_args(annotation))
    return any(_IS_PATH in (*metadata, *getattr(kind, "__metadata__", ())) for kind in kinds)


def _has_bool(value: Any) -> bool:
    """Return True for a Boolean, also as an item of a list or a mapping."""
    if isinstance(value, dict | list):
        return any(map(_has_bool, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool)


def _basic_types(kind: Any) -> set[Any]:
    """Return the types without parameters of an annotation, at any depth."""
    if isinstance(kind, type) and not get_args(kind):
        return {kind}
    return {one for part in get_args(kind) for one in _basic_types(part)}


def _refuse_written_break(text: str) -> str:
    """Reject a backslash and n where a line break is meant; LaTeX's `\\ne` and `\\text` stay."""
    if found := re.search(r"\\[nrt](?![a-z])", text):
        raise ValueError(
            f"has a backslash and {found[0][1:]}; for a line break or a tab write it in double "
            'quotes, as "\\n", in which YAML reads it so'
        )
    return text


def _refuse_file_name(text: str) -> str:
    if re.fullmatch(r"\S+\.(?:txt|md|jinja2?|j2|ya?ml|json)", text.strip()):
        raise ValueError("is the name of a file; give the text itself")
    return text


def _bool_or_text(value: Any) -> Any:
    if not isinstance(value, bool | str):
        raise ValueError("must be true, false or the name of a score, such as eval_macro/maj@32")
    return value


Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]  # of a moving average
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
PATTERNS = {  # rules of names, in words
    r"^[A-Za-z]\w*$": "must be letters, digits and _, and start with a letter",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$": (
        "must be a file name of at most 200 letters, digits, '.', '_' and '-', which starts with a "
        "letter or a digit"
    ),
    r"^\w+$": "must be letters, digits and _",
}
_REWARD, _FILE, _VARIABLE = PATTERNS
RewardName = Annotated[str, Field(pattern=_REWARD)]
Name = Annotated[str, Field(pattern=_FILE)]  # of a file or a folder
Variable = Annotated[str, Field(pattern=_VARIABLE)]  # of the environment
# Values that `reward.verifier: null` gets; the second one if prompts end inside thinking.
MATH_ANSWER = "megatron_rl.rewards.math_answer:verify_math_answer"
AFTER_THINKING = "megatron_rl.rewards.math_answer:verify_after_thinking"


class Section(BaseModel):
    """A group of settings: immutable, without unknown keys; each key's docstring documents it."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False,
        use_attribute_docstrings=True,
    )  # fmt: skip

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bools(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject YAML's `yes` and `true`, which Python would accept as the number 1."""
        kinds = _basic_types(cls.model_fields[str(info.field_name)].annotation)
        if kinds & {int, float} and bool not in kinds and _has_bool(value):
            raise ValueError("must be a number")  # pydantic adds the key and the value
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_empty_texts(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject an empty text, as of an unset shell variable, where null turns something off."""
        kinds = _basic_types(cls.model_fields[str(info.field_name)].annotation)
        if value == "" and {str, NoneType} <= kinds and info.field_name != "system_prompt":
            raise ValueError("is empty; give a value, or null for none")
        return value


class RunSection(Section):
    """The run directory, and whether a run continues an earlier run."""

    dir: PathText = "runs"
    """Folder that contains the run directories."""
    name: Name | None = None
    """Name of the run's folder in `run.dir`; null is the config file's name and the time."""
    resume: Literal["never", "auto"] = "never"
    """`never` refuses an existing run; `auto` continues it from its last checkpoint, or starts
    it."""
    accept_changes: list[str] = []
    """Inputs whose changed content a resumed run accepts, by their settings: `[data.train,
    reward.verifier]` (`docs/reliability.md`)."""
    check_memory: bool = True
    """On CUDA, refuse a run that a dry run finds too large for the memory (`docs/scaling.md`)."""
    largest_expert_share: Annotated[float, Field(ge=1)] = 1.5
    """Tokens of the busiest expert-parallel rank in that check, over an equal share."""


class ModelSection(Section):
    """The model to train."""

    path: PathText = ""
    """Hugging Face folder with config, safetensors and tokenizer, a name on the hub as `OWNER/NAME`
    or `OWNER/NAME@REVISION` (`docs/prompts.md`), or a GGUF file (`docs/models.md`). Required."""
    reference: PathTexts | None = None
    """Frozen reference policy of `objective.kl`, such as a teacher, with the policy's tokens; null
    is `model.path`. A mapping such as `{math: models/M, code: models/C}` has a model for each
    `data_source` of the prompts (`docs/distillation.md`)."""
    trust_remote_code: bool = False
    """Run the tokenizer's Python code in a model folder without `tokenizer.json` (Moonlight, Kimi;
    `docs/models.md`). The model itself never comes from such code."""
    transformer_engine: bool | None = None
    """Use Transformer Engine; null uses it in bfloat16 on CUDA if it is installed."""
    fp8: Literal["tensorwise", "blockwise"] | None = None
    """Scaling recipe of FP8 matrix products in the layers, with Transformer Engine; null disables
    FP8."""
    routing_replay: Literal["none", "behavior", "engine"] = "none"
    """Experts of a token in updates: the router's present choice (`none`), the choice in the
    behavior pass (`behavior`), or the engine's, in that pass too (`engine`;
    `docs/routing-replay.md`)."""

    @property
    def references(self) -> dict[str | None, str]:
        """Given models of the reference policies by data source; None: of all sources."""
        if isinstance(self.reference, dict):
            return dict[str | None, str](self.reference.items())
        return {} if self.reference is None else {None: self.reference}


class RolloutSection(Section):
    """Generation: the rollout batch of each step and the vLLM engine."""

    tensor: Count = 1
    """vLLM's tensor parallel size; the remaining ranks run further engines."""
    expert_parallel: bool = False
    """Place whole experts on each rank of an engine, not a slice of every expert; on CUDA."""
    prompts_per_step: Count = 256
    """Prompts in a rollout batch."""
    responses_per_prompt: Count = 8
    """Responses to each prompt (the group size)."""
    max_response_tokens: Count = 15360
    """Maximum response length in tokens; generation stops there."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    """Token ids that end a response, besides the end tokens of the model's files."""
    stop: list[Annotated[str, Field(min_length=1), AfterValidator(_refuse_written_break)]] = []
    """Strings that end a response; they remain part of it."""
    temperature: Positive = 1.0
    """Sampling temperature, also of the log-probs that are trained on."""
    top_k: Annotated[int, Field(ge=2)] | None = None
    """Draw each token from the k most probable tokens, over which training computes log-probs too
    (`docs/sampling.md`); null is all."""
    top_p: Fraction = 1.0
    """Draw each token from the most probable tokens whose probabilities sum to this; needs
    `top_k`."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Draw each token from the tokens with at least this fraction of the largest probability; needs
    `top_k`."""
    max_num_seqs: Count = 256
    """Maximum number of sequences that one engine generates at a time."""
    gpu_memory_utilization: Fraction = 0.5
    """Fraction of the device's memory for the engine, on CUDA."""
    kv_cache_mib: Count = 256
    """Engine's KV cache in MiB, on CPU."""
    stall_seconds: Positive = 1800.0
    """Seconds without a finished response on an engine after which the run ends with an error."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `LLM`, such as `{enable_prefix_caching: false}`; arguments that
    the trainer sets or relies on are refused."""

    @property
    def removes_tokens(self) -> bool:
        """True if the sampler draws from a part of the vocabulary."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


class RewardSection(Section):
    """Grading of responses by a verifier."""

    verifier: str | None = None
    """Function that grades a response, as `module:function` (`docs/rewards.md`); null compares
    mathematical answers by `verify_math_answer`, or `verify_after_thinking` if prompts end inside
    thinking, of `megatron_rl.rewards.math_answer`."""
    workers: Count | None = None
    """Verifier processes per rank; null is one per CPU core of the rank."""
    time_limit_seconds: Positive = 5.0
    """Seconds for one call of the verifier, not counting the time for which other processes take
    the cores; then the call is killed and the response gets reward 0."""
    on_error: Literal["end", "zero", "retry"] = "end"
    """If a verifier raises, returns no reward or crashes: `end` ends the run, `zero` gives reward
    0, `retry` tries again after 1, 2, 4, 8 and 16 s and then ends the run."""
    batch_size: Count = 32
    """Maximum number of responses per call of a verifier that takes lists, and of calls in progress
    per worker of an async verifier."""
    weights: dict[RewardName, float] = Field(default_factory=dict)
    """Weights of the named rewards that a verifier returns, such as `{correct: 1.0, format: 0.2}`,
    in their sum; 0 only records a reward. Empty: all are 1."""


class WorkersSection(Section):
    """The processes that run verifiers and environments."""

    variables: list[Variable] = []
    """Environment variables for these processes besides the standard ones, such as a judge's API
    key."""
    memory_gib: Positive | None = 4.0
    """Private memory in GiB of each process beyond that of the loaded module; further allocations
    raise a MemoryError in your code. null removes the limit."""


class AdvantageSection(Section):
    """Computation of advantages from rewards."""

    estimator: Literal[
        "group_relative", "leave_one_out", "batch_baseline", "optimal_value", "raw"
    ] = "group_relative"
    """Baseline that is subtracted from a reward: a statistic of its group; with `batch_baseline`
    the rollout batch's mean; with `raw` only `shift`."""
    std: Literal["sample", "population", "none"] = "sample"
    """Standard deviation by which `group_relative` and `batch_baseline` divide; `none`: no
    division."""
    beta: Positive = 1.0
    """Temperature of `optimal_value` (OAPL) in units of reward: near 0 the best reward of the
    group, large the mean."""
    credit: Literal["response", "turn"] = "response"
    """Unit that has an advantage: a whole response, or each turn of a conversation by the rewards
    from that turn on (`docs/agents.md`)."""
    shift: float = 0.0
    """Constant in units of reward that is added to the baseline of `group_relative`, or is the
    baseline of `raw`."""


class ObjectiveSection(Section):
    """A named objective; further keys override its components (listed in `docs/objectives.md`)."""

    model_config = ConfigDict(extra="allow")

    name: str = "pnpo"
    """Name of the objective (`docs/objectives.md`). `objective.function: module:function` is a loss
    of your own."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if not isinstance(value, (str, dict, cls)):
            raise ValueError("must be a name, as in objective: gspo, or a mapping {name: gspo}")
        if isinstance(value, dict) and "function" in value:
            return {"name": FUNCTION} | value
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> "ObjectiveSection":
        choose_objective(self.name, self.overrides)  # or ValueError
        return self

    @property
    def choice(self) -> Spec:
        """The specification of the objective, with the overrides applied."""
        return choose_objective(self.name, self.overrides)

    @property
    def overrides(self) -> dict[str, Any]:
        """The keys that the config changes of the named objective."""
        return dict(self.model_extra or {})


class OptimizerSection(Section):
    """AdamW and the learning rate schedule."""

    learning_rate: Positive = 1.0e-6
    """Learning rate after the warm-up."""
    min_learning_rate: NonNegative = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: NonNegative = 10.0
    """Rollout batches over which the learning rate rises linearly from 0, rounded to whole
    updates."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate from the end of the warm-up to the last update."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay; 0 disables it."""
    beta1: Decay = 0.9
    """Decay rate of the first moment."""
    beta2: Decay = 0.999
    """Decay rate of the second moment."""
    epsilon: Positive = 1.0e-8
    """Term added to the square root of the second moment."""
    max_grad_norm: NonNegative = 1.0
    """Maximum gradient norm; 0 disables clipping."""


class TrainerSection(Section):
    """Training: steps, reuse of each rollout batch, micro-batches, checkpoints."""

    steps: Count = 150
    """Training steps; each trains on one rollout batch."""
    epochs: Count = 4
    """Passes over each rollout batch."""
    minibatches: Count = 4
    """Minibatches, and so optimizer updates, per epoch."""
    tokens_per_micro_batch: Count = 16384
    """Maximum number of packed tokens in one forward pass; the default fits one response of full
    length."""
    share_prompts: bool | Literal["auto"] = "auto"
    """Compute what sequences have in common at their beginning once, such as a group's prompt
    (`docs/shared-prompts.md`). `auto` does so where that costs less, not on Transformer Engine's
    layers; true wherever it saves rows."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass; `selective` recomputes MLPs, or router and
    experts."""
    checkpoint_every: Count = 10
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Count = 2
    """Most recent checkpoints to keep."""
    keep_best: Annotated[bool | str, BeforeValidator(_bool_or_text)] = False
    """Also keep the checkpoint with the best evaluation score: true is the sets' mean avg@k, a name
    such as `eval_macro/maj@32` or `eval/aime24/pass@8` that score."""
    keep_every: Count | None = None
    """Steps between checkpoints that are kept permanently; null keeps none."""
    self_test_every: Count | None = None
    """Steps between self-tests of the run (`docs/reliability.md`); null disables them."""
    stall_seconds: Positive | None = 600.0
    """Seconds without progress on a rank after which the watchdog ends the job so that it can be
    restarted, twice as long in set-up, checkpoints and export; null disables the watchdog."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and activations; `auto` is bfloat16 on CUDA and float32 on CPU. For a
    pretrained model on a CPU with avx512_bf16 or AMX (`lscpu`) try bfloat16, at a larger
    train-inference mismatch (`docs/measurements.md`)."""


class ReshardingSection(Section):
    """Transfer of weights from the actor to the engine, and its checks."""

    bucket_mib: Positive | None = None
    """MiB that a rank sends and receives in one round, half of the transfer's extra memory; null is
    512 on CUDA and 64 on a CPU."""
    time_limit_seconds: Positive = 300.0
    """Seconds for transferring the weights in one sync."""

    def bucket_bytes(self, *, cuda: bool) -> int:
        """Return the size of a bucket on this kind of device."""
        return round((self.bucket_mib or (512 if cuda else 64)) * 2**20)


class ParallelSection(Section):
    """The actor's layout; tensor * pipeline * context * data = number of processes that train."""

    tensor: Count = 1
    """Tensor parallel size, with sequence parallelism."""
    pipeline: Count = 1
    """Pipeline stages."""
    context: Count = 1
    """Context parallel size: ranks over which each sequence is split."""
    data: Count | None = None
    """Data-parallel replicas; null derives them from the number of processes."""
    engine_ranks: Count | None = None
    """Number of processes, the last ones, that only generate, in engines of `rollout.tensor` each,
    while the others train (`docs/engine-ranks.md`); null generates and trains on all in turn."""
    expert: Count = 1
    """Expert parallel size of a mixture of experts; expert * expert_tensor must divide tensor *
    context * data."""
    expert_tensor: Count | None = None
    """Tensor parallel size of each expert, a divisor of `parallel.tensor`; null is 1 (whole
    experts) if `parallel.expert` is above 1, else `parallel.tensor`."""
    virtual_stages: Count = 1
    """Interleaved model chunks per pipeline stage; 1 disables interleaving."""
    stage_layers: list[Count] | None = None
    """Layers of each pipeline stage (with virtual stages, of each model chunk in model order); null
    divides evenly, else with fewer layers at both ends."""

    @property
    def model_size(self) -> int:
        """Processes of one data-parallel replica."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_tensor_size(self) -> int:
        """Tensor parallel size of each expert."""
        if self.expert_tensor is not None:
            return self.expert_tensor
        return 1 if self.expert > 1 else self.tensor


class OverlongSection(Section):
    """Length penalty (DAPO, arXiv 2503.14476, section 3.4)."""

    buffer: Count = 4096
    """Tokens before `rollout.max_response_tokens` over which the penalty grows linearly; 1: only
    responses of full length have it."""
    penalty: Positive = 1.0
    """Maximum penalty in units of reward."""


class ShapingSection(Section):
    """Reward shaping: from the verifier's reward to the training reward; not for evaluation."""

    signed: bool = False
    """Map each reward r to 2 r - 1. A response that was not graded (time limit, failed verifier,
    unparsable ground truth) keeps reward 0."""
    overlong: OverlongSection | None = None
    """Length penalty; null disables it."""
    truncated: Literal["train", "mask"] = "train"
    """Train on responses cut at the length limit; `mask` counts their reward in the group's
    baseline and excludes their tokens from the loss."""


class DynamicSamplingSection(Section):
    """Dynamic sampling: replace groups whose rewards are all equal, which have no gradient."""

    rounds: Annotated[int, Field(ge=0)] = 0
    """Maximum number of further generation rounds per step; 0 disables dynamic sampling."""


class EarlyStoppingSection(Section):
    """Early stopping of reuse: end the epochs on a rollout batch before `trainer.epochs`."""

    acceptance: Fraction | None = None
    """Stop before an update whose `gate/acceptance` is below this; null: no such criterion."""
    kl: Positive | None = None
    """Stop before an update whose `ratio/kl_to_behavior` is above this; null: no such criterion."""


class OfflineSection(Section):
    """Training without an engine, on rollouts that were generated earlier or elsewhere."""

    rollouts: PathText | None = None
    """Run directory, its `rollouts/`, or a parquet file to train on; null generates rollouts."""
    behavior: PathText = "file"
    """Source of the behavior log-probs: `file`, or the folder of a model that recomputes them."""


def _check_partial_rollouts(value: Any) -> Any:
    given = value if isinstance(value, dict) else {"every_tokens": value}
    tokens, cache = given.get("every_tokens"), given.get("cache", "keep")
    is_count = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 1
    known = given.keys() <= {"every_tokens", "cache"} and cache in ("keep", "recompute")
    if value is not None and not (is_count and known):
        raise ValueError(
            "must be a number of tokens, at least 1, or {every_tokens: N, cache: keep} or "
            "{every_tokens: N, cache: recompute}"
        )
    return value


class LagSection(Section):
    """Policy lag: the age of the trained rollouts (`docs/policy-lag.md`)."""

    batches: Annotated[int, Field(ge=0)] = 0
    """Rollout batches between generating a group and training on it."""
    policy: str | None = None
    """A lag policy of your own, as `module:class`, in place of `lag.batches`."""
    settings: dict[str, Any] = Field(default={})
    """Keyword arguments of `lag.policy`."""
    sync_weights_every: Count = 1
    """Rollout batches between weight syncs to the engine."""
    partial_rollouts: Annotated[
        int | dict[str, Any] | None, BeforeValidator(_check_partial_rollouts)
    ] = None
    """Sync weights during generation, every N tokens of each response: N, or `{every_tokens: N,
    cache: keep}`, or `{every_tokens: N, cache: recompute}`. null disables partial rollouts."""

    @model_validator(mode="after")
    def _check_policy(self) -> Self:
        if self.policy is not None and self.batches:
            raise ValueError(
                f"policy={self.policy} and batches={self.batches} both set the lag; unset one"
            )
        if self.policy is None and self.settings:
            raise ValueError("settings are those of lag.policy, which is not set; unset them")
        return self

    @property
    def every_tokens(self) -> int:
        """Tokens of a response between two weight syncs; 0 without partial rollouts."""
        if isinstance(self.partial_rollouts, dict):
            return int(self.partial_rollouts["every_tokens"])
        return self.partial_rollouts or 0

    @property
    def keeps_cache(self) -> bool:
        """True if later tokens attend to keys and values that older weights computed."""
        return (
            not isinstance(self.partial_rollouts, dict)
            or self.partial_rollouts.get("cache") != "recompute"
        )


class ReplaySection(Section):
    """Replay: rollout batches with groups of earlier batches (`docs/policy-lag.md`)."""

    capacity: Count = 1
    """Size of the replay buffer in rollout batches of new groups, with the current one; 1 disables
    replay."""
    fresh: Fraction = 1.0
    """Fraction of new groups in a rollout batch; the rest is sampled uniformly from the buffer."""


Target = Literal["qkv", "proj", "fc1", "fc2"]


def _refuse_dropout(value: Any) -> Any:
    if value != 0:
        raise ValueError(
            "must be 0: the same weights must give the same log-probs in scoring and in training"
        )
    return value


class LoraSection(Section):
    """LoRA: train low-rank adapters and keep the model's weights frozen (`docs/lora.md`)."""

    rank: Count = 32
    """Rank r of the adapters."""
    alpha: Positive = 32.0
    """Scale of the adapters: the weight is W + alpha / rank * B A."""
    targets: list[Target] = Field(default_factory=lambda: list(get_args(Target)), min_length=1)
    """Linears with an adapter: `qkv` and `proj` (output) of attention, `fc1` (gate and up) and
    `fc2` (down) of MLPs and experts."""
    path: PathText | None = None
    """PEFT folder (adapter_config.json, adapter_model.safetensors), such as `RUN/adapter`, from
    whose adapters training starts; null: from the model alone."""
    push: Literal["merged", "adapters"] = "merged"
    """Weights that the engine receives: W with its update (`merged`), or W once and then only
    adapters, which vLLM applies (`adapters`)."""
    dropout: Annotated[float, BeforeValidator(_refuse_dropout)] = 0.0
    """Dropout of the adapters' inputs; only 0 is supported."""

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, value: list[Target]) -> list[Target]:
        if len(set(value)) < len(value):
            raise ValueError("lists a linear twice; list each once")
        return value

    @property
    def scale(self) -> float:
        """Factor of B A in the sum with a weight."""
        return self.alpha / self.rank


class CriticSection(Section):
    """A critic: advantages from the values of a second model (`docs/critic.md`)."""

    path: PathText | None = None
    """Model folder from whose weights the critic starts, of any supported architecture and size
    with the policy's vocabulary; null is `model.path`. Values start at 0, or with the value head
    (`score.weight`) that the folder has, as `megatron-rl export --critic` writes it."""
    learning_rate: Positive = 1.0e-5
    """Learning rate of the critic; its other settings are those of `optimizer`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first steps that train the critic alone and leave the policy as it is."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount of later rewards, per step that `discount` counts."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """Weight of later errors in the policy's advantages; 1 is the return minus the value, 0 the
    one-step error."""
    target_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """The same for the returns that values are trained on; 1 makes them the discounted rewards."""
    length_alpha: Positive | None = None
    """Length-adaptive lambda of VAPO in place of `gae_lambda`: 1 - 1 / (length_alpha * L) for a
    response of L tokens, at least 0; their value is 0.05. null uses `gae_lambda`."""
    discount: Literal["token", "turn"] = "token"
    """Step that `gamma` and the lambdas count: a sampled token, or a turn of the policy, within
    which both are then 1."""
    value_clip: Positive | None = 0.5
    """Largest change of a value within a step, in units of reward, that the value loss rewards;
    null disables clipping."""
    whiten: bool = True
    """Shift and scale the advantages of each minibatch to mean 0 and standard deviation 1 over its
    sampled tokens."""
    lora: LoraSection | None = None
    """Train adapters and the value head alone: rank, alpha and targets as in `lora`; null trains
    all weights."""


class EnvironmentSection(Section):
    """Conversations: every response has turns of the policy, which an environment answers."""

    name: str
    """Environment as `module:class` (`docs/agents.md`). Required."""
    max_context_tokens: Count
    """Maximum length of a conversation in tokens: prompt, turns and observations (with
    `max_rewrites`, of each of its sequences). `rollout.max_response_tokens` limits the policy's
    tokens in all turns."""
    max_turns: Count = 8
    """Maximum number of turns of the policy."""
    max_turn_tokens: Count | None = None
    """Maximum tokens of one turn; a longer turn is cut and answered as it is. null: only
    `rollout.max_response_tokens` limits it."""
    time_limit_seconds: Positive = 60.0
    """Seconds for one answer, not counting the time for which other processes take the cores; then
    the environment's process is killed and its conversation gets reward 0."""
    on_error: Literal["end", "zero"] = "end"
    """If an environment raises, returns no valid answer or crashes: `end` ends the run, `zero` ends
    the conversation with reward 0."""
    max_rewrites: Annotated[int, Field(ge=0, le=255)] = 0
    """Number of times that an agent may change earlier messages, such as by a summary. Each change
    begins another sequence of the same response; a further change is a failure (`on_error`)."""
    in_rounds: bool = False
    """Continue all conversations of an engine together, once each turn is answered: slower, but on
    CUDA independent of the environments' speed."""


# Parameters of transformers' apply_chat_template that it does not pass on to the template.
RESERVED_ARGUMENTS = {
    "conversation", "tokenize", "add_generation_prompt", "continue_final_message", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}  # fmt: skip


@dataclass(frozen=True)
class FixedDate:
    """The function `strftime_now` of chat templates for one date, at midnight, instead of now."""

    date: str  # YYYY-MM-DD

    def __call__(self, format: str) -> str:
        return datetime.fromisoformat(self.date).strftime(format)


def _as_date(value: Any) -> str:
    """Return YAML's date or a text as YYYY-MM-DD."""
    try:
        return date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError("must be a date as YYYY-MM-DD, such as 2026-01-31") from None


class ColumnsSection(Section):
    """Column names of a prompt file; a dot selects a field of a struct."""

    prompt: str = "prompt"
    """Column of the prompt: the user's message as text, or a list of chat messages."""
    answer: str = "reward_model.ground_truth"
    """Column of the ground truth, a text or a number."""
    source: str | None = None
    """Column of the data source; null is `data_source` if it exists, else the file's name."""
    tools: str | None = None
    """Column of the tools that the chat template shows, a list of schemas or its JSON text; null is
    `tools` if it exists (`docs/prompts.md`)."""
    completion: str = "completion"
    """With `sft`, column of the answer to `prompt`, a text or chat messages, for rows whose
    messages do not end with the assistant's."""


class MixedSetSection(Section):
    """One of several sets of training prompts."""

    path: PathText
    """File or data set of prompts, in the forms of `data.train`."""
    weight: Positive = 1.0
    """Relative share of this set in every rollout batch."""
    columns: ColumnsSection | None = None
    """Column names of this set; null uses `data.columns`."""


class DataSection(Section):
    """Training prompts."""

    train: PathText = ""
    """Training prompts: a .parquet, .jsonl or .csv file, `hf:OWNER/NAME`, or a folder saved by
    `datasets` (`docs/prompts.md`). `data.train` or `data.mix` is required."""
    mix: dict[Name, MixedSetSection] = Field(default_factory=dict)
    """Several training sets by name, each `{path, weight, columns}`, instead of `data.train`: its
    file or data set, its share of every rollout batch (1 by default), its columns (default:
    `data.columns`)."""
    epochs: Positive | None = None
    """Length of the run in passes over the training prompts, instead of `trainer.steps`
    (`docs/prompts.md`)."""
    columns: ColumnsSection = ColumnsSection()
    """Column names of all files without columns of their own; the defaults are those of
    DAPO-Math-17k."""
    max_prompt_tokens: Count = 1024
    """Maximum prompt length in tokens."""
    too_long: Literal["error", "skip"] = "error"
    """For a prompt above the maximum length: `error` refuses the file, `skip` leaves the prompt out
    and prints how many."""
    bad_rows: Literal["error", "skip"] = "error"
    """For a malformed row, or a row that the chat template refuses: `error` refuses the file,
    `skip` leaves the row out and prints how many."""
    system_prompt: Annotated[str, Field(min_length=1), AfterValidator(_refuse_file_name)] | None = (
        None
    )
    """System message of every prompt, in training and evaluation; a row with a system message is
    then malformed. null adds none."""
    template: Literal["chat", "raw"] = "chat"
    """`chat` applies the model's chat template; `raw` uses the text as it is, for base models
    (`docs/prompts.md`)."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, such as `{enable_thinking: false}`."""
    date: Annotated[str, BeforeValidator(_as_date)] | None = None
    """Date as YYYY-MM-DD for chat templates that write today's; null is the date of the run's first
    start."""

    @property
    def rendering(self) -> dict[str, Any]:
        """All arguments of the chat template."""
        fixed = {} if self.date is None else {"strftime_now": FixedDate(self.date)}
        return fixed | self.template_arguments

    @field_validator("template_arguments")
    @classmethod
    def _refuse_reserved_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if reserved := sorted(arguments.keys() & RESERVED_ARGUMENTS):
            raise ValueError(
                f"{', '.join(reserved)}: set by the run, not an argument of the template; remove it"
            )
        for name, value in arguments.items():
            if isinstance(value, str) and value.strip().lower() in ("true", "false"):
                raise ValueError(
                    f"{name} is the text {value!r}, which a template takes as true; write it "
                    "without quotes"
                )
        return arguments


class EvaluationSetSection(Section):
    """One set of held-out problems; a path alone is short for `{path: ...}`."""

    path: PathText
    """File or data set of prompts, in the forms of `data.train`."""
    columns: ColumnsSection | None = None
    """Column names of this set; null uses `data.columns`."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        if not isinstance(value, (str, dict, cls)):
            raise ValueError("must be a path, or a mapping of path and columns")
        return {"path": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _to_path(self, whole: SerializerFunctionWrapHandler) -> Any:
        return self.path if self.columns is None else whole(self)


class EvalSection(Section):
    """Held-out evaluation: Avg@samples, before, during and after training."""

    sets: dict[Name, EvaluationSetSection] = Field(default_factory=dict)
    """Evaluation sets by name, each a path in the forms of `data.train`, or `{path, columns}`."""
    every: Count = 10
    """Steps between evaluations."""
    samples: Count = 32
    """Responses to each prompt."""
    temperature: NonNegative = 0.7
    """Sampling temperature; 0 is greedy decoding, one response to each prompt."""
    top_p: Fraction = 0.9
    """Nucleus sampling: cumulative probability of the tokens to draw from; 1 disables it."""


class SftSection(Section):
    """Supervised fine-tuning: `data.train` has conversations, whose assistant's messages are
    trained by their cross entropy. Its presence sets rollout.responses_per_prompt=1,
    objective.name=sft, advantage.estimator=raw, trainer.epochs=1 and trainer.minibatches=1."""

    turns: Literal["all", "last"] = "all"
    """Messages of the assistant that are trained: all, or the last one."""
    validation: dict[Name, EvaluationSetSection] = Field(default_factory=dict)
    """Sets of conversations whose loss is computed every `eval.every` steps, in the forms of
    `eval.sets`."""


def _check_keep_rollouts(value: Any) -> Any:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_count and value not in ("all", "sampled"):
        raise ValueError(
            "must be all, sampled, or the number of newest steps that keep all rollouts, 1 or more"
        )
    return value


class LoggingSection(Section):
    """Logging in addition to metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard files."""
    traced_responses: Annotated[int, Field(ge=0)] = 8
    """Responses per step, in whole groups drawn by seed and prompt, whose log-probs at every epoch
    are saved in `traces/`; 0 disables it."""
    sample_every: Annotated[int, Field(ge=0)] = 10
    """Rollout batches between samples (prompt, response, reward) that are printed and sent to
    TensorBoard and W&B, from the first batch on; 0 disables them."""
    keep_rollouts: Annotated[
        Literal["all", "sampled"] | int, BeforeValidator(_check_keep_rollouts)
    ] = "all"
    """Rollouts kept in `rollouts/`: `all`; a number N: those of the newest N steps and a sample of
    groups of older steps; `sampled`: that sample of every step (`docs/reliability.md`)."""
    wandb: str | None = None
    """Weights & Biases project, as `PROJECT` or `ENTITY/PROJECT`; null: none."""
    mlflow: str | None = None
    """MLflow experiment, created if it does not exist; null: none. `MLFLOW_TRACKING_URI` has its
    server's address."""
    trackio: str | None = None
    """trackio project, which `trackio show --project NAME` opens; null: none."""
