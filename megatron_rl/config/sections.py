"""Every setting of a run, with its type, default and rule.

The defaults are the published PNPO configuration (1.5B model, 16k context) where the paper gives
one. `docs/configuration.md` is made from this file by `tools/configuration_page.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from megatron_rl.objectives.choice import choose_objective
from megatron_rl.objectives.spec import OaplSpec, ObjectiveSpec


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


class Section(BaseModel):
    """A group of settings: immutable, without unknown keys; a key's docstring says what it does."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False,
        use_attribute_docstrings=True,
    )  # fmt: skip


class RunSection(Section):
    """Where the run is kept and whether it continues an earlier one."""

    dir: str = "runs"
    """the folder of run directories"""
    name: Name | None = None
    """the run's folder in `run.dir`; null: the config file's name and the time"""
    resume: Literal["never", "auto"] = "never"
    """`never`: refuse an existing run; `auto`: continue it from its last checkpoint, or begin it"""
    check_memory: bool = True
    """rehearse the run on CUDA and refuse it where it does not fit (`docs/scaling.md`)"""


class ModelSection(Section):
    """The model to train."""

    path: str = ""
    """a Hugging Face folder with config, safetensors and tokenizer; must be given"""
    reference: str | None = None
    """the frozen policy of `objective.kl`; null: `model.path` itself"""
    transformer_engine: bool | None = None
    """null: in bfloat16 on CUDA, wherever Transformer Engine is installed; false: never"""
    fp8: Literal["tensorwise", "blockwise"] | None = None
    """of the layers' matrix products, by Transformer Engine"""


class ParallelSection(Section):
    """The actor's layout; tensor * pipeline * context * data = number of processes."""

    tensor: Count = 1
    """tensor parallel size"""
    pipeline: Count = 1
    """pipeline stages"""
    context: Count = 1
    """ranks over which every sequence is split"""
    data: Count | None = None
    """replicas; null: follows from the number of processes"""
    expert: Count = 1
    """of a mixture of experts: ranks over which they are spread; divides context * data"""
    virtual_stages: Count = 1
    """model chunks per pipeline stage, interleaved"""
    sequence: bool = True
    """sequence parallelism wherever `parallel.tensor` > 1"""

    @property
    def model_size(self) -> int:
        """Processes of one data-parallel replica."""
        return self.tensor * self.pipeline * self.context


class RolloutSection(Section):
    """What is generated in each step and how the engine runs."""

    tensor: Count = 1
    """vLLM's tensor parallel size; data parallel over the rest"""
    expert_parallel: bool = False
    """whole experts on each rank of an engine, instead of a slice of every one; on CUDA"""
    prompts: Count = 256
    """prompts in a rollout batch"""
    responses_per_prompt: Annotated[int, Field(ge=2)] = 8
    """responses to each prompt: a group"""
    max_response_tokens: Count = 15360
    """where a response is cut off"""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    """tokens that end a response, besides those that the model's configs and tokenizer name"""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """texts that end a response; they stay in it"""
    temperature: Positive = 1.0
    """of sampling, and of the log-probs that are trained on; there is no `top_p`, because ratios
    are to the whole distribution"""
    max_sequences: Count = 256
    """sequences that one engine generates at once"""
    mismatch: Literal["none", "bf16", "fp8_e4m3"] = "none"
    """rounds the weights that the engine is given (`docs/policy-lag.md`)"""
    memory_fraction: Fraction = 0.5
    """of the device's memory that the engine may take, on CUDA"""
    kv_cache_mib: Count = 256
    """the engine's memory for keys and values, on a CPU"""
    time_limit_seconds: Positive = 7200.0
    """for generating one rollout batch, or one evaluation set"""
    stall_seconds: Positive = 1800.0
    """in which an engine finishes no response, that end the run"""
    engine: dict[str, Any] = Field(default_factory=dict)
    """further arguments of vLLM's `LLM`, as `{enable_prefix_caching: false}`; what would break a
    contract between trainer and engine is refused by name"""


class RewardSection(Section):
    """How responses are judged."""

    verifier: str = "megatron_rl.rewards.math_answer:verify_math_answer"
    """`module:function` of what judges a response (`docs/rewards.md`)"""
    workers: Count | None = None
    """processes per rank that judge; null: as many as the rank has cores"""
    time_limit_seconds: Positive = 5.0
    """for one call of the verifier; what takes longer is ended and earns 0"""
    on_error: Literal["end", "zero", "retry"] = "end"
    """where the verifier raises, returns no reward or dies: end the run; give 0; or try again after
    1, 2, 4, 8 and 16 s and then end the run"""
    batch_size: Count = 32
    """responses that a worker judges at once, where the verifier is async or takes lists"""
    environment: list[Annotated[str, Field(pattern=r"^\w+$")]] = []
    """variables that the verifier sees of the environment besides ordinary ones: a judge's key"""


class AdvantageSection(Section):
    """How rewards become advantages."""

    estimator: Literal[
        "group_relative", "leave_one_out", "batch_baseline", "optimal_value", "raw"
    ] = "group_relative"
    """what a reward is compared with; `raw`: with `shift` alone"""
    std: Literal["sample", "population", "none"] = "sample"
    """what `group_relative` and `batch_baseline` divide by"""
    beta: Positive = 1.0
    """of `optimal_value` (OAPL), in units of reward"""
    shift: float = 0.0
    """added to the baseline of `group_relative`, and the baseline of `raw`, in units of reward"""


class ObjectiveSection(Section):
    """A named objective; further keys override its axes (`docs/objectives.md` lists them)."""

    model_config = ConfigDict(extra="allow")

    name: str = "pnpo"
    """which objective"""

    @model_validator(mode="after")
    def _check(self) -> "ObjectiveSection":
        choose_objective(self.name, self.overrides)  # or ValueError
        return self

    @property
    def choice(self) -> ObjectiveSpec | OaplSpec:
        """What is computed."""
        return choose_objective(self.name, self.overrides)

    @property
    def overrides(self) -> dict[str, Any]:
        """What the config changes of the named objective."""
        return dict(self.model_extra or {})


class OptimizerSection(Section):
    """AdamW, its warm-up counted in rollout batches as the paper counts steps."""

    learning_rate: Positive = 1.0e-6
    """after the warm-up"""
    min_learning_rate: NonNegative = 0.0
    """where the decay ends"""
    warmup_steps: NonNegative = 10.0
    """rollout batches over which the rate rises from 0; a part of one is rounded to updates"""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """of the rate, from the warm-up to the last update"""
    weight_decay: NonNegative = 0.1
    """decoupled, as in AdamW"""
    beta1: Decay = 0.9
    """of the first moment"""
    beta2: Decay = 0.999
    """of the second moment"""
    epsilon: Positive = 1.0e-8
    """added to the root of the second moment"""
    clip_grad: NonNegative = 1.0
    """the largest norm of a gradient; 0: any"""
    effective_samples_power: NonNegative = 0.0
    """the rate of an update is multiplied by its `weight/effective_sample_fraction` to this power;
    0: never"""


class TrainerSection(Section):
    """The regime: steps, reuse of each rollout batch, micro-batches, checkpoints."""

    steps: Count = 150
    """rollout batches"""
    epochs: Count = 4
    """passes over each rollout batch"""
    minibatches: Count = 4
    """optimizer updates per epoch"""
    tokens_per_micro_batch: Count = 16384
    """the packing budget of one forward; by default one response of full length"""
    zero_advantage: Literal["skip", "compute"] = "skip"
    """whether responses of advantage 0 are computed where no loss or gradient needs them"""
    recompute: Literal["none", "selective", "full"] = "none"
    """activations computed again in the backward instead of kept; `selective`: those of MLPs or of
    router and experts"""
    checkpoint_every: Count = 10
    """steps; the last step is always kept"""
    keep_checkpoints: Count = 2
    """how many, the newest"""
    keep_best: bool | str = False
    """keep the one with the best evaluation too, by the mean of avg@k over the sets or by a score
    that is named, as `eval_macro/maj@32` or `eval/aime24/pass@8`; of the steps that are saved"""
    milestones: Count | None = None
    """steps; checkpoints of their multiples are kept for ever"""
    skipped_updates: Count = 3
    """in a row, for a loss or gradient that is not finite, that end the run"""
    self_test_every: Count | None = None
    """steps; that often the run tries its own contracts (`docs/reliability.md`)"""
    stall_seconds: Positive | None = 600.0
    """in which a rank makes no progress, that end the run for a restart (twice as many in set-up,
    checkpoints and the export); null: nobody looks (`docs/reliability.md`)"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of weights and activations; `auto`: bfloat16 on CUDA, float32 on a CPU"""


class WandbSection(Section):
    """Weights & Biases, used only where a project is named."""

    project: str
    """the project"""
    entity: str | None = None
    """the user or team; null: the default of the login"""


class ReshardingSection(Section):
    """How weights reach the engine, and how closely that is watched."""

    bucket_mib: Count = 64
    """what a rank sends plus receives in one round"""
    full_check_every: Annotated[int, Field(ge=0)] = 50
    """pushes; every push compares checksums"""
    time_limit_seconds: Positive = 300.0
    """for the exchange of one push"""


class LoggingSection(Section):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    """TensorBoard files in the run directory"""
    traced_responses: Annotated[int, Field(ge=0)] = 8
    """responses per step, whole groups first, whose log-probs at every epoch of reuse are kept in
    `traces/`, for the report; chosen by prompt, so that runs of one seed trace the same"""
    wandb: WandbSection | None = None
    """null: nothing is sent anywhere"""
