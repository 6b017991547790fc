"""The sections of a config: each setting with its type, default and rule.

Defaults follow the published PNPO configuration (1.5B model, 16k context) where the paper gives
one. `tools/configuration_page.py` generates `docs/configuration.md` from the docstrings.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from megatron_rl.config.paths import PathText
from megatron_rl.objectives.named import Spec, choose_objective
from megatron_rl.objectives.spec import FUNCTION


def refuse_bool(value: Any) -> Any:
    """Reject YAML's `yes` and `true`, which Python would accept as the number 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number")  # pydantic adds the key and the value
    return value


def _bool_or_text(value: Any) -> Any:
    if not isinstance(value, bool | str):
        raise ValueError("must be true, false or the name of a score, such as eval_macro/maj@32")
    return value


Count = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]  # of a moving average
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
PATTERNS = {  # rules of names, in words
    r"^[A-Za-z]\w*$": "must be letters, digits and _, and start with a letter",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": (
        "must be a file name of letters, digits, '.', '_' and '-', which starts with a letter or a "
        "digit"
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


class RunSection(Section):
    """The run directory, and whether a run continues an earlier one."""

    dir: PathText = "runs"
    """Folder that contains the run directories."""
    name: Name | None = None
    """Name of the run's folder in `run.dir`; null combines the config file's name and the time."""
    resume: Literal["never", "auto"] = "never"
    """`never` refuses to start if the run exists; `auto` continues it from its last checkpoint, or
    starts it if it does not exist."""
    accept_changes: list[str] = []
    """Inputs whose changed content a resumed run accepts and records in `changes.jsonl`, named by
    their settings, such as `[data.train, reward.verifier]`; the content of others must be that of
    the last start (`docs/reliability.md`)."""
    check_memory: bool = True
    """On CUDA, do a dry run before the start and refuse a run that does not fit into memory
    (`docs/scaling.md`)."""
    largest_expert_share: Annotated[float, Field(ge=1)] = 1.5
    """Tokens that the busiest expert-parallel rank receives in that check, over an equal share."""


class ModelSection(Section):
    """The model to train."""

    path: PathText = ""
    """Hugging Face folder with config, safetensors and tokenizer, or a model's name on the hub as
    `OWNER/NAME` or `OWNER/NAME@REVISION` (`docs/prompts.md`). Required."""
    reference: PathText | None = None
    """Model of the frozen reference policy that `objective.kl` uses; null uses `model.path`."""
    trust_remote_code: bool = False
    """Run the tokenizer's Python code in the model folder, if it has no `tokenizer.json`, as in
    Moonlight and Kimi (`docs/models.md`). The model itself never comes from such code."""
    transformer_engine: bool | None = None
    """Use Transformer Engine; null uses it in bfloat16 on CUDA if it is installed."""
    fp8: Literal["tensorwise", "blockwise"] | None = None
    """Scaling recipe for FP8 matrix products in the layers (needs Transformer Engine); null
    disables FP8."""
    routing_replay: Literal["none", "behavior", "engine"] = "none"
    """Experts of a token in updates: the router's present choice (`none`), those that it chose when
    behavior log-probs were computed (`behavior`), or the engine's, in that pass and in updates
    (`engine`; `docs/routing-replay.md`)."""


class RolloutSection(Section):
    """Generation: the rollout batch of each step and the vLLM engine."""

    tensor: Count = 1
    """vLLM's tensor parallel size; the remaining ranks run further engines (data parallel)."""
    expert_parallel: bool = False
    """Place whole experts on each rank of an engine instead of a slice of every expert; on CUDA."""
    prompts_per_step: Count = 256
    """Number of prompts in a rollout batch."""
    responses_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Number of responses to each prompt (the group size)."""
    max_response_tokens: Count = 15360
    """Maximum response length in tokens; longer responses are truncated."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    """Token ids that end a response, in addition to those in the model's configs and tokenizer."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a response; they remain part of it."""
    temperature: Positive = 1.0
    """Sampling temperature, also applied to the log-probs that are trained on. There is no `top_p`,
    because likelihood ratios refer to the full distribution."""
    max_num_seqs: Count = 256
    """Maximum number of sequences that one engine generates concurrently."""
    gpu_memory_utilization: Fraction = 0.5
    """Fraction of the device memory that the engine may use, on CUDA."""
    kv_cache_mib: Count = 256
    """Size of the engine's KV cache in MiB, on CPU."""
    time_limit_seconds: Positive = 7200.0
    """Time limit in seconds for generating one rollout batch or one evaluation set; n rollout
    batches generated together have n times as long."""
    stall_seconds: Positive = 1800.0
    """Seconds without a finished response on an engine before the run ends with an error."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of vLLM's `LLM`, such as `{enable_prefix_caching: false}`; arguments
    that the trainer sets or relies on are rejected."""


class RewardSection(Section):
    """Grading of responses by a verifier."""

    verifier: str | None = None
    """Function that grades a response, as `module:function` (`docs/rewards.md`); null compares
    mathematical answers by `megatron_rl.rewards.math_answer:verify_math_answer`, or by its
    `verify_after_thinking` if prompts end inside thinking."""
    workers: Count | None = None
    """Number of verifier processes per rank; null uses one per CPU core of the rank."""
    time_limit_seconds: Positive = 5.0
    """Time limit in seconds for one call of the verifier, without the time for which others take
    the processor cores; a call that takes longer is killed and the response gets reward 0."""
    on_error: Literal["end", "zero", "retry"] = "end"
    """Reaction to a verifier that raises, returns no reward or crashes: `end` ends the run, `zero`
    gives reward 0, `retry` tries again after 1, 2, 4, 8 and 16 s and then ends the run."""
    batch_size: Count = 32
    """Maximum number of responses per call of a verifier that takes lists, and of calls in progress
    per worker of one that is async."""
    environment: list[Variable] = []
    """Environment variables passed to the verifier in addition to the standard ones, such as an
    API key."""
    weights: dict[RewardName, float] = Field(default_factory=dict)
    """Weight of each named reward of a verifier that returns several, such as
    `{correct: 1.0, format: 0.2}`; the reward is the weighted sum. If empty, every weight is 1. A
    weight of 0 records the reward without training on it."""
    memory_gib: Positive | None = 4.0
    """Private memory in GiB that a worker may use in addition to that of the loaded module;
    allocations above it raise a MemoryError in the verifier. null removes the limit."""


class AdvantageSection(Section):
    """Computation of advantages from rewards."""

    estimator: Literal[
        "group_relative", "leave_one_out", "batch_baseline", "optimal_value", "raw"
    ] = "group_relative"
    """Baseline that is subtracted from a reward: a statistic of its group, with `batch_baseline`
    the mean of the trained rollout batch, with `raw` only `shift`."""
    std: Literal["sample", "population", "none"] = "sample"
    """Standard deviation that `group_relative` and `batch_baseline` divide by; `none` disables the
    division."""
    beta: Positive = 1.0
    """Temperature of `optimal_value` (OAPL) in units of reward; small values approach the best
    reward of the group, large values its mean."""
    credit: Literal["response", "turn"] = "response"
    """Unit that has an advantage: a whole response, or each turn of a conversation. With `turn`,
    the estimator compares the rewards from that turn on (`docs/agents.md`)."""
    shift: float = 0.0
    """Constant added to the baseline of `group_relative`, or the whole baseline of `raw`, in units
    of reward."""


class ObjectiveSection(Section):
    """A named objective; further keys override its components (listed in `docs/objectives.md`)."""

    model_config = ConfigDict(extra="allow")

    name: str = "pnpo"
    """Name of the objective (`docs/objectives.md`); `function` is a loss of your own, given as
    `objective.function: module:function`."""

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
    """Rollout batches over which the learning rate rises linearly from 0; fractions are rounded to
    whole updates."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate decay from the end of the warm-up to the last update."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay, as in AdamW; 0 disables it."""
    beta1: Decay = 0.9
    """Decay rate of the first moment."""
    beta2: Decay = 0.999
    """Decay rate of the second moment."""
    epsilon: Positive = 1.0e-8
    """Term added to the square root of the second moment for numerical stability."""
    max_grad_norm: NonNegative = 1.0
    """Maximum gradient norm; 0 disables clipping."""
    effective_samples_power: NonNegative = 0.0
    """Exponent p: the learning rate of each update is multiplied by its
    `weight/effective_sample_fraction` to the power p. 0 disables it."""


class TrainerSection(Section):
    """Training: steps, reuse of each rollout batch, micro-batches, checkpoints."""

    steps: Count = 150
    """Number of training steps; each step trains on one rollout batch."""
    epochs: Count = 4
    """Number of passes over each rollout batch."""
    minibatches: Count = 4
    """Number of minibatches, and so of optimizer updates, per epoch."""
    tokens_per_micro_batch: Count = 16384
    """Maximum number of packed tokens in one forward pass; the default fits one response of full
    length."""
    zero_advantage: Literal["skip", "compute"] = "skip"
    """Compute responses with advantage 0 although neither loss nor gradient depends
    on them."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass; `selective` recomputes MLPs, or router and
    experts."""
    checkpoint_every: Count = 10
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Count = 2
    """Number of most recent checkpoints to keep."""
    keep_best: Annotated[bool | str, BeforeValidator(_bool_or_text)] = False
    """Also keep the checkpoint with the best evaluation score: true uses the mean of avg@k over the
    sets, a name such as `eval_macro/maj@32` or `eval/aime24/pass@8` uses that score."""
    keep_every: Count | None = None
    """Steps between checkpoints that are kept permanently; null keeps none permanently."""
    max_consecutive_skipped_updates: Count = 3
    """Number of consecutive updates skipped for a non-finite loss or gradient after which the run
    ends with an error."""
    stop_after_dead_steps: Count | None = None
    """Number of consecutive steps in which no response has an advantage after which the run ends
    with an error; null disables it."""
    self_test_every: Count | None = None
    """Steps between self-tests of the run (`docs/reliability.md`); null disables them."""
    stall_seconds: Positive | None = 600.0
    """Seconds without progress on a rank before the watchdog ends the job so that it can be
    restarted, doubled during set-up, checkpoints and export (`docs/reliability.md`). null disables
    the watchdog."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and activations; `auto` is bfloat16 on CUDA and float32 on CPU."""


class ReshardingSection(Section):
    """Transfer of weights from the actor to the engine, and its checks."""

    bucket_mib: Count | None = None
    """Maximum data in MiB that a rank sends and receives in one round of the transfer; null is 512
    on CUDA and 64 on a CPU."""
    full_check_every: Annotated[int, Field(ge=0)] = 50
    """Weight syncs between full checks, which compare every slice; the first sync is always checked
    in full, and 0 disables further ones. Every sync compares checksums."""
    time_limit_seconds: Positive = 300.0
    """Time limit in seconds for transferring the weights in one sync."""

    def bucket_bytes(self, *, cuda: bool) -> int:
        """Return the size of a bucket on this kind of device."""
        return (self.bucket_mib or (512 if cuda else 64)) * 2**20
