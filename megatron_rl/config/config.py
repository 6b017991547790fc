"""The config of a run, and the rules that involve more than one section."""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from megatron_rl.config.combinations import combination_problems
from megatron_rl.config.sections import (
    AdvantageSection,
    ColumnsSection,
    CriticSection,
    DataSection,
    DynamicSamplingSection,
    EarlyStoppingSection,
    EnvironmentSection,
    EvalSection,
    LagSection,
    LoggingSection,
    LoraSection,
    ModelSection,
    ObjectiveSection,
    OfflineSection,
    OptimizerSection,
    ParallelSection,
    ReplaySection,
    ReshardingSection,
    RewardSection,
    RolloutSection,
    RunSection,
    Section,
    SftSection,
    ShapingSection,
    TrainerSection,
    WorkersSection,
)
from megatron_rl.objectives.spec import FunctionSpec, can_reject, needs_reference, uses_advantages

SFT_DEFAULTS: dict[str, dict[str, Any]] = {
    "rollout": {"responses_per_prompt": 1},
    "objective": {"name": "sft"},
    "advantage": {"estimator": "raw"},
    "trainer": {"epochs": 1, "minibatches": 1},
}


class Config(Section):
    """The config of a run."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 42
    """Random seed of the run; every random generator derives its own seed from it."""
    behavior: Literal["actor", "engine"] = "actor"
    """Source of the behavior log-probs, the denominator of all likelihood ratios: recomputed by the
    `actor`, or reported by the `engine` (`docs/policy-lag.md`)."""
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    lora: LoraSection | None = None
    data: DataSection = DataSection()
    sft: SftSection | None = None
    parallel: ParallelSection = ParallelSection()
    rollout: RolloutSection = RolloutSection()
    environment: EnvironmentSection | None = None
    reward: RewardSection = RewardSection()
    workers: WorkersSection = WorkersSection()
    advantage: AdvantageSection = AdvantageSection()
    critic: CriticSection | None = None
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection = OptimizerSection()
    trainer: TrainerSection = TrainerSection()
    lag: LagSection = LagSection()
    replay: ReplaySection = ReplaySection()
    shaping: ShapingSection = ShapingSection()
    dynamic_sampling: DynamicSamplingSection = DynamicSamplingSection()
    early_stopping: EarlyStoppingSection = EarlyStoppingSection()
    offline: OfflineSection = OfflineSection()
    resharding: ReshardingSection = ReshardingSection()
    eval: EvalSection = EvalSection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="before")
    @classmethod
    def _set_defaults_of_sft(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("sft") is None:
            return values
        filled = dict(values)
        for name, defaults in SFT_DEFAULTS.items():
            section = filled.get(name)
            if section is None or isinstance(section, dict):
                filled[name] = defaults | (section or {})
        return filled

    @model_validator(mode="after")
    def _check(self) -> "Config":
        problems = []
        if not self.model.path:
            problems.append("model.path: missing; give a Hugging Face model folder")
        if not (self.data.train or self.data.mix or self.offline.rollouts):
            problems.append("data.train: missing; give a .parquet, .jsonl or .csv file of prompts")
        if self.data.train and self.data.mix:
            problems.append(
                "data.train and data.mix are both set; move data.train into data.mix, or unset it "
                "with \"data.train=''\""
            )
        if self.rollout.prompts_per_step % self.trainer.minibatches:
            problems.append(
                f"rollout.prompts_per_step={self.rollout.prompts_per_step} cannot be split into "
                f"trainer.minibatches={self.trainer.minibatches} equal minibatches; "
                "make the number of prompts a multiple of the number of minibatches"
            )
        if self.optimizer.min_learning_rate > self.optimizer.learning_rate:
            problems.append(
                "optimizer.min_learning_rate is above optimizer.learning_rate; lower it"
            )
        stall, limit = self.trainer.stall_seconds, self.reward.time_limit_seconds
        if stall is not None and limit >= stall:
            problems.append(
                f"reward.time_limit_seconds={limit:g}: one call of the verifier may take longer "
                f"than trainer.stall_seconds={stall:g}, after which the watchdog ends the run; "
                "raise trainer.stall_seconds above it, or lower the limit"
            )
        overlong, longest = self.shaping.overlong, self.rollout.max_response_tokens
        if overlong is not None and overlong.buffer > longest:
            problems.append(
                f"shaping.overlong.buffer={overlong.buffer} is more than "
                f"rollout.max_response_tokens={longest}; lower it"
            )
        problems += self._unused_settings() + self._objective_problems() + self._best_problems()
        problems += self._lag_problems()
        problems += combination_problems(self) + environment_problems(self) + lora_problems(self)
        problems += epochs_problems(self) + engine_rank_problems(self) + sft_problems(self)
        problems += sampling_problems(self) + critic_problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @model_serializer(mode="wrap")
    def _leave_out_default_steps(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `trainer.steps` while `data.epochs` is set, next to which it is refused."""
        values: dict[str, Any] = whole(self)
        if self.data.epochs is not None:
            values.get("trainer", {}).pop("steps", None)
        return values

    def _unused_settings(self) -> list[str]:
        """List settings without effect in combination with others."""
        advantage, optimizer, stopping = self.advantage, self.optimizer, self.early_stopping
        estimator = f"advantage.estimator={advantage.estimator}"
        # Of each setting whether it has no effect, and what it has none with.
        unused: dict[str, tuple[object, str]] = {
            f"advantage.std={advantage.std}": (
                advantage.std != "sample"
                and advantage.estimator in ("leave_one_out", "optimal_value", "raw"),
                f"{estimator}, which divides by no standard deviation",
            ),
            f"advantage.beta={advantage.beta}": (
                advantage.beta != 1.0 and advantage.estimator != "optimal_value",
                f"{estimator}: it is the temperature of optimal_value",
            ),
            f"advantage.shift={advantage.shift}": (
                advantage.shift and advantage.estimator not in ("group_relative", "raw"),
                estimator,
            ),
            f"optimizer.min_learning_rate={optimizer.min_learning_rate}": (
                optimizer.min_learning_rate and optimizer.decay == "constant",
                "optimizer.decay=constant",
            ),
            "early_stopping": (
                self.trainer.epochs == 1 and (stopping.acceptance or stopping.kl),
                "trainer.epochs=1, which reuses no rollout batch",
            ),
            f"replay.capacity={self.replay.capacity}": (
                self.replay.fresh == 1 and self.replay.capacity > 1,
                "replay.fresh=1, which replays nothing",
            ),
            f"offline.behavior={self.offline.behavior}": (
                self.offline.rollouts is None and self.offline.behavior != "file",
                "offline.rollouts=null",
            ),
            "behavior=engine": (
                self.behavior == "engine" and self.offline.behavior != "file",
                f"offline.behavior={self.offline.behavior}, which recomputes the log-probs",
            ),
            **{
                f"{key}={path}": (
                    isinstance(self.objective.choice, FunctionSpec)
                    or not needs_reference(self.objective.choice.needs),
                    f"objective.name={self.objective.name} without objective.kl",
                )
                for key, path in self.given_references.items()
            },
            f"reward.weights={self.reward.weights}": (
                self.offline.rollouts is not None and self.reward.weights,
                "offline.rollouts, whose column reward has the sums",
            ),
            **self._unused_data_settings(),
        }
        return [
            f"{setting}: no effect with {other}; unset one, or change the other"
            for setting, (is_unused, other) in unused.items()
            if is_unused
        ]

    def _unused_data_settings(self) -> dict[str, tuple[object, str]]:
        """Settings of prompts and evaluations, as in `_unused_settings`."""
        template = "data.template=raw, which uses no chat template"
        return {
            "data.template_arguments": (
                self.data.template == "raw" and self.data.template_arguments,
                template,
            ),
            "data.date": (self.data.template == "raw" and self.data.date, template),
            "data.columns.completion": (
                self.sft is None and self.data.columns.completion != ColumnsSection().completion,
                "rollouts; it is of sft",
            ),
            **{
                f"eval.{name}": (
                    "sets" not in self.eval.model_fields_set
                    and getattr(self.eval, name) != getattr(EvalSection(), name),
                    "no eval.sets",
                )
                for name in ("samples", "temperature", "top_p")
            },
        }

    def given(self, *keys: str) -> list[str]:
        """Return those of `section.name` that have another value than their default."""
        found = []
        for key in keys:
            name, _, setting = key.partition(".")
            section = getattr(self, name)
            if section is not None:
                field = type(section).model_fields[setting]
                default = field.get_default(call_default_factory=True)
                found += [key] if getattr(section, setting) != default else []
        return found

    def _best_problems(self) -> list[str]:
        metric = self.trainer.keep_best
        if metric in ("true", "false"):
            return [f"trainer.keep_best='{metric}' is a text; write {metric} without quotes"]
        if metric is False or (metric is True and self.eval.sets):
            return []
        if metric is True:
            return ["trainer.keep_best=true: without scores none is best; give eval.sets"]
        n = 1 if self.eval.temperature == 0 else self.eval.samples
        pass_at_k = [f"pass@{k}" for k in range(2, n + 1) if k == n or k & (k - 1) == 0]
        scores = [f"avg@{n}", *pass_at_k, *([f"maj@{n}"] if n > 1 else [])]
        sets = ["eval_macro", *(f"eval/{name}" for name in self.eval.sets)]
        if self.eval.sets and metric in [f"{name}/{score}" for name in sets for score in scores]:
            return []
        return [
            f"trainer.keep_best={metric}: not a score of this run's evaluations; give true, or "
            f"{' or '.join(sets)} followed by /{', /'.join(scores)}"
        ]

    def _objective_problems(self) -> list[str]:
        problems, name, advantage = [], self.objective.name, self.advantage
        if self.early_stopping.acceptance and not can_reject(self.objective.choice):
            problems.append(
                f"early_stopping.acceptance={self.early_stopping.acceptance}: no effect with "
                f"objective.name={name}, which rejects no token; use early_stopping.kl, or unset it"
            )
        if name == "oapl" and advantage.estimator != "optimal_value":
            problems.append(
                f"objective.name=oapl needs the advantages R - V*, not advantage.estimator="
                f"{advantage.estimator}; set advantage.estimator=optimal_value"
            )
        if advantage.credit == "turn" and advantage.estimator == "optimal_value":
            problems.append(
                "advantage.credit=turn: advantage.estimator=optimal_value is the value of a whole "
                "response; choose another estimator, or unset advantage.credit"
            )
        if advantage.shift and advantage.estimator == "group_relative" and advantage.std != "none":
            problems.append(
                f"advantage.shift={advantage.shift} is in units of reward, but advantage.std="
                f"{advantage.std} rescales rewards; set advantage.std=none"
            )
        if name == "asymre" and not advantage.shift and self.critic is None:
            problems.append(
                "objective.name=asymre needs a baseline below the mean reward, but advantage.shift "
                "is 0; set advantage.shift=-0.1 and advantage.std=none"
            )
        if name == "sao" and self.behavior == "actor":
            problems.append(
                "objective.name=sao needs ratios to the engine's log-probs, but behavior=actor "
                "uses the actor's; set behavior=engine"
            )
        return problems

    def _lag_problems(self) -> list[str]:
        problems, every = [], self.lag.sync_weights_every
        if self.eval.sets and self.eval.every % every:
            problems.append(
                f"eval.every={self.eval.every}: the engine gets the current weights only every "
                f"lag.sync_weights_every={every} steps; make eval.every a multiple of it"
            )
        if self.lag.partial_rollouts is not None:
            problems += partial_rollout_problems(self)
        if not 1 <= self.fresh_groups < self.rollout.prompts_per_step and self.replay.fresh < 1:
            problems.append(
                f"replay.fresh={self.replay.fresh} of rollout.prompts_per_step="
                f"{self.rollout.prompts_per_step} rounds to no groups or to all of them; change one"
            )
        return problems

    def sides(self, processes: int) -> tuple[int, int]:
        """Return the numbers of processes that train and that generate; both are all by default."""
        engines = self.parallel.engine_ranks
        return (processes, processes) if engines is None else (processes - engines, engines)

    def process_problems(self, processes: int) -> list[str]:
        """List the reasons why this number of processes does not fit the layout."""
        parallel, tensor, problems = self.parallel, self.rollout.tensor, []
        engines, of_these = parallel.engine_ranks, ""
        if engines is not None:
            if engines >= processes:
                return [
                    f"parallel.engine_ranks={engines} of {processes} processes leaves none that "
                    "trains; lower it, or start more processes"
                ]
            processes -= engines
            of_these = f" besides the {engines} of parallel.engine_ranks"
        unit = parallel.model_size * (parallel.data or 1)
        if processes % unit or (parallel.data and processes != unit):
            problems.append(
                f"{processes} process{'es do' if processes > 1 else ' does'}{of_these} not fit "
                f"tensor {parallel.tensor} * pipeline "
                f"{parallel.pipeline} * context {parallel.context} * data {parallel.data or '?'}; "
                "the product must equal the number of processes: change one of parallel.*, or "
                f"start {unit + (engines or 0)} processes"
            )
            return problems  # what follows would repeat it
        over, slices = processes // parallel.pipeline, parallel.expert_tensor_size
        if over % (parallel.expert * slices):
            times = f" * expert_tensor={slices}" if slices > 1 else ""
            problems.append(
                f"parallel.expert={parallel.expert}{times} does not divide tensor * context * "
                f"data = {over}; choose a divisor"
            )
        if (generating := engines or processes) % tensor:
            problems.append(
                f"rollout.tensor={tensor}: vLLM's tensor parallel size {tensor} does not divide "
                f"the {generating} ranks; choose a divisor"
            )
        return problems

    @property
    def has_late_advantages(self) -> bool:
        """True if advantages are computed only when the groups of a step have been selected.

        `batch_baseline` needs the rewards of the whole rollout batch, which may combine groups from
        several generation calls.
        """
        mixed = self.replay.fresh < 1 or self.dynamic_sampling.rounds > 0
        mixed = mixed or self.lag.policy is not None
        return self.advantage.estimator == "batch_baseline" and mixed

    @property
    def windows(self) -> int:
        """Number of weight versions that generate the longest response (partial rollouts)."""
        every = self.lag.every_tokens
        return -(-self.rollout.max_response_tokens // every) if every else 1

    @property
    def fresh_groups(self) -> int:
        """Number of new groups in a rollout batch, from the second batch on."""
        return round(self.replay.fresh * self.rollout.prompts_per_step)

    @property
    def code(self) -> dict[str, str]:
        """Names `module:attribute` of the user's code, by config key."""
        named = {
            "reward.verifier": self.reward.verifier,
            "environment.name": self.environment and self.environment.name,
            "objective.function": self.objective.overrides.get("function"),
            "lag.policy": self.lag.policy,
        }
        return {key: str(name) for key, name in named.items() if name}

    @property
    def prompt_files(self) -> dict[str, tuple[str, ColumnsSection]]:
        """Path and columns of every prompt file, by config key."""
        training = {key: (path, columns) for key, (path, columns, _) in self.training.items()}
        return training | self.validation_files | self.evaluation_files

    @property
    def validation_files(self) -> dict[str, tuple[str, ColumnsSection]]:
        """Path and columns of every set of conversations that is not trained, by config key."""
        return {
            f"sft.validation.{name}": (item.path, item.columns or self.data.columns)
            for name, item in (self.sft.validation if self.sft else {}).items()
        }

    @property
    def conversation_files(self) -> set[str]:
        """Config keys of the files with conversations for `sft`; other files have prompts."""
        return {*self.training, *self.validation_files} if self.sft is not None else set()

    @property
    def has_engine(self) -> bool:
        """True if the run generates responses, at least to evaluate."""
        return self.offline.rollouts is None and (self.sft is None or bool(self.eval.sets))

    @property
    def evaluation_files(self) -> dict[str, tuple[str, ColumnsSection]]:
        """Path and columns of every evaluation set, by config key."""
        return {
            f"eval.sets.{name}": (item.path, item.columns or self.data.columns)
            for name, item in self.eval.sets.items()
        }

    @property
    def training(self) -> dict[str, tuple[str, ColumnsSection, float]]:
        """Path, columns and weight of every training set, by config key."""
        if self.offline.rollouts is not None:  # rollouts contain their prompts
            return {}
        if not self.data.mix:
            return {"data.train": (self.data.train, self.data.columns, 1.0)}
        return {
            f"data.mix.{name}": (item.path, item.columns or self.data.columns, item.weight)
            for name, item in self.data.mix.items()
        }

    @property
    def references(self) -> dict[str | None, str]:
        """Model folders of the reference policies by data source; None: of all sources."""
        return self.model.references or {None: self.model.path}

    @property
    def given_references(self) -> dict[str, str]:
        """Model folders of the reference policies that the config names, by key."""
        return {
            "model.reference" if source is None else f"model.reference.{source}": path
            for source, path in self.model.references.items()
        }

    @property
    def given_models(self) -> dict[str, str]:
        """Model folders besides the policy's that the config names, by key."""
        own = self.critic.path if self.critic is not None else None
        return self.given_references | ({} if own is None else {"critic.path": own})

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates per training step."""
        return self.trainer.epochs * self.trainer.minibatches

    @property
    def first_policy_step(self) -> int:
        """First step that trains the policy: earlier steps train the critic alone."""
        return 1 + (0 if self.critic is None else self.critic.warmup_steps)

    @property
    def warmup_updates(self) -> int:
        """Optimizer updates until the learning rate reaches its full value."""
        return round(self.optimizer.warmup_steps * self.updates_per_step)

    @property
    def tokenizer_options(self) -> dict[str, Any]:
        """Options of `load_tokenizer` for the model."""
        return {"template": self.data.template, "trust_remote_code": self.model.trust_remote_code}

    @property
    def max_model_tokens(self) -> int:
        """Maximum tokens of one sequence: a prompt and its response, or a later history."""
        if self.environment is not None:
            return self.environment.max_context_tokens
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def max_packed_tokens(self) -> int:
        """Maximum tokens of a prompt and its response in a pack: of all their sequences."""
        return self.max_model_tokens * self.max_sequences

    @property
    def max_sequences(self) -> int:
        """Maximum number of sequences of a response; 1 unless its history may be replaced."""
        return 1 if self.environment is None else 1 + self.environment.max_rewrites


def sampling_problems(config: Config) -> list[str]:
    """List why the sampler's settings of a `Config` cannot be used."""
    rollout = config.rollout
    given = {"top_k": rollout.top_k is not None, "top_p": rollout.top_p < 1,
             "min_p": rollout.min_p > 0}  # fmt: skip
    settings = " and ".join(
        f"rollout.{name}={getattr(rollout, name)}" for name, is_set in given.items() if is_set
    )
    if not settings:
        return []
    if rollout.top_k is not None:
        return []
    return [
        f"{settings} needs rollout.top_k, which bounds the ids that are recorded with each token; "
        "set it, for example to 512"
    ]


def partial_rollout_problems(config: Config) -> list[str]:
    """List conflicts of `config.lag.partial_rollouts` with other settings of a `Config`."""
    if not config.lag.keeps_cache or config.behavior == "engine":
        return []
    return [
        "lag.partial_rollouts with cache: keep: later tokens attend to keys and values of older "
        "weights, so the actor cannot recompute their log-probs; set behavior=engine, or cache: "
        "recompute"
    ]


def engine_rank_problems(config: Config) -> list[str]:
    """List conflicts of `config.parallel.engine_ranks` with other settings of a `Config`."""
    number, lag = config.parallel.engine_ranks, config.lag
    if number is None:
        return []
    if config.offline.rollouts is not None or config.sft is not None:
        return []  # refused by `combination_problems`
    if lag.policy is not None or lag.batches:
        return []
    return [
        f"parallel.engine_ranks={number} with lag.batches=0: a step would wait for its own "
        "rollouts while the ranks that train are idle; set lag.batches to 1 or more, or unset "
        "parallel.engine_ranks"
    ]


def lora_problems(config: Config) -> list[str]:
    """List conflicts of `config.lora` with other sections of a `Config`."""
    if config.lora is None:
        return []
    if "learning_rate" in config.optimizer.model_fields_set:
        return []
    return [
        f"lora needs a learning rate of its own: optimizer.learning_rate="
        f"{config.optimizer.learning_rate:g} is the default for all weights, and adapters need "
        "10 to 100 times as much; set it"
    ]


def critic_problems(config: Config) -> list[str]:
    """List conflicts of `config.critic` with other sections of a `Config`."""
    if config.critic is None or config.sft is not None:  # refused by `combination_problems`
        return []
    objective, problems = config.objective, []
    if objective.name == "asymre":  # it asks for a setting of `advantage`
        problems.append(
            "critic: objective.name=asymre needs a baseline below the mean reward of a group, not "
            "values; choose another objective, or unset critic"
        )
    elif config.advantage != AdvantageSection():
        problems.append(
            "advantage: no effect with critic, whose values are the baseline; unset one"
        )
    if not uses_advantages(objective.choice):
        problems.append(
            f"critic: objective.name={objective.name} does not use advantages of tokens; choose "
            "another objective, or unset critic"
        )
    if config.dynamic_sampling.rounds and config.rollout.responses_per_prompt == 1:
        problems.append(
            f"dynamic_sampling.rounds={config.dynamic_sampling.rounds} replaces groups whose "
            "rewards are all equal, which every group of rollout.responses_per_prompt=1 is; unset "
            "dynamic_sampling, or raise responses_per_prompt"
        )
    warmup, steps = config.critic.warmup_steps, config.trainer.steps
    if config.data.epochs is None and warmup >= steps:
        problems.append(
            f"critic.warmup_steps={warmup} of trainer.steps={steps} leaves no step that trains the "
            "policy; lower it, or raise trainer.steps"
        )
    has_turns = config.environment is not None or config.offline.rollouts is not None
    if config.critic.discount == "turn" and not has_turns:
        problems.append(
            "critic.discount=turn: without environment a response is one turn, within which gamma "
            "and the lambdas are 1; unset it, or set them to 1 instead"
        )
    if config.critic.lora is not None and "learning_rate" not in config.critic.model_fields_set:
        problems.append(
            f"critic.lora needs a learning rate of its own: critic.learning_rate="
            f"{config.critic.learning_rate:g} is the default for all weights, and adapters need "
            "10 to 100 times as much; set it"
        )
    if (lora := config.critic.lora) is not None and (lora.path or lora.push != "merged"):
        problems.append(
            "critic.lora: path and push have no effect, because a critic's adapters start at 0 and "
            "are not sent to the engine; unset them"
        )
    if config.critic.length_alpha is not None and config.critic.discount == "turn":
        problems.append(
            "critic.length_alpha: its lambda follows from the number of tokens, but "
            "critic.discount=turn counts turns; unset one"
        )
    if config.critic.gae_lambda != 0.95 and config.critic.length_alpha is not None:
        problems.append(
            f"critic.gae_lambda={config.critic.gae_lambda:g}: no effect with critic.length_alpha; "
            "unset one"
        )
    return problems


def environment_problems(config: Config) -> list[str]:
    """List conflicts of `config.environment` with other sections of a `Config`."""
    environment: EnvironmentSection | None = config.environment
    if environment is None:
        return []
    written, context = config.rollout.max_response_tokens, environment.max_context_tokens
    problems = []
    for name, value in (
        ("data.max_prompt_tokens", config.data.max_prompt_tokens),
        ("rollout.max_response_tokens", written),
    ):
        if context <= value:
            problems.append(
                f"environment.max_context_tokens={context} must be above {name}={value}, which is "
                "only a part of a conversation; raise it, or lower the other"
            )
    if (environment.max_turn_tokens or 0) > written:
        problems.append(
            f"environment.max_turn_tokens={environment.max_turn_tokens} is more than all turns "
            f"may have, rollout.max_response_tokens={written}; lower it"
        )
    if environment.max_rewrites >= environment.max_turns:
        problems.append(
            f"environment.max_rewrites={environment.max_rewrites} must be below "
            f"environment.max_turns={environment.max_turns}: a history changes only between two "
            "turns; lower it, or raise max_turns"
        )
    limit, stall = environment.time_limit_seconds, config.rollout.stall_seconds
    if limit >= stall:
        problems.append(
            f"environment.time_limit_seconds={limit:g}: one answer may take longer than "
            f"rollout.stall_seconds={stall:g}, after which the run ends; raise that, or lower the "
            "limit"
        )
    return problems


def epochs_problems(config: Config) -> list[str]:
    """List conflicts of `config.data.epochs` with other settings of a `Config`."""
    epochs, problems = config.data.epochs, []
    if epochs is not None and "steps" in config.trainer.model_fields_set:
        problems.append(
            f"data.epochs={epochs:g} and trainer.steps={config.trainer.steps} both set the length "
            "of the run; remove trainer.steps, or set data.epochs=null"
        )
    skips = [name for name in ("too_long", "bad_rows") if getattr(config.data, name) == "skip"]
    if epochs is not None and config.environment is not None and skips:
        problems.append(
            f"data.epochs={epochs:g} cannot count the prompts that data.{skips[0]}=skip leaves out "
            "where an environment adds its tools to them; set data.epochs=null and trainer.steps"
        )
    return problems


def sft_problems(config: Config) -> list[str]:
    """List conflicts of `config.sft` with other settings, or what only makes sense with it."""
    rollout = config.rollout
    if config.sft is None:
        problems = []
        if rollout.responses_per_prompt < 2 and config.critic is None:
            problems.append(
                f"rollout.responses_per_prompt={rollout.responses_per_prompt}: must be at least 2, "
                "because an advantage compares the responses to a prompt; raise it, set critic to "
                "compare them with values, or set sft to train on given answers"
            )
        if config.objective.name == "sft":
            problems.append(
                "objective.name=sft trains every answer alike, which makes no sense for responses "
                "of the policy; choose another objective, or set sft and data.train to "
                "conversations"
            )
        return problems
    fixed = {
        "rollout.responses_per_prompt": (rollout.responses_per_prompt, 1),
        "objective.name": (config.objective.name, "sft"),
        "advantage.estimator": (config.advantage.estimator, "raw"),
        "advantage.shift": (config.advantage.shift, 0.0),
        "advantage.credit": (config.advantage.credit, "response"),
    }
    return [
        f"{key}={value}: has no meaning with sft, which trains given answers; unset {key}, or sft"
        for key, (value, wanted) in fixed.items()
        if value != wanted
    ]
