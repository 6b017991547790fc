"""A whole run's settings, and the rules that concern more than one of them."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rl.config.data_sections import ColumnsSection, DataSection, EvalSection
from megatron_rl.config.lag_sections import LagSection, ReplaySection
from megatron_rl.config.ppo_sections import (
    DynamicSamplingSection,
    OfflineSection,
    ReuseUntilSection,
    ShapingSection,
)
from megatron_rl.config.sections import (
    AdvantageSection,
    LoggingSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    ParallelSection,
    ReshardingSection,
    RewardSection,
    RolloutSection,
    RunSection,
    Section,
    TrainerSection,
)


class Config(Section):
    """A whole run."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 42
    """of everything random; each use derives its own from it"""
    behavior: Literal["actor", "engine"] = "actor"
    """whose log-probs of a response are the denominator of its ratios (`docs/policy-lag.md`)"""
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
    lag: LagSection = LagSection()
    replay: ReplaySection = ReplaySection()
    shaping: ShapingSection = ShapingSection()
    dynamic_sampling: DynamicSamplingSection = DynamicSamplingSection()
    reuse_until: ReuseUntilSection = ReuseUntilSection()
    offline: OfflineSection = OfflineSection()
    resharding: ReshardingSection = ReshardingSection()
    eval: EvalSection = EvalSection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="after")
    def _check(self) -> "Config":
        problems = []
        if not self.model.path:
            problems.append("model.path: missing; name a Hugging Face model folder")
        if not (self.data.train or self.data.mix or self.offline.rollouts):
            problems.append("data.train: missing; name a file of prompts, .parquet or .jsonl")
        if self.data.train and self.data.mix:
            problems.append("data.train and data.mix are both set; name the file in data.mix too")
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
        problems += self._unread() + self._objective_problems() + self._best_problems()
        problems += self._lag_problems() + self._ppo_problems()
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
        if advantage.shift and advantage.estimator not in ("group_relative", "raw"):
            problems.append(f"advantage.shift={advantage.shift}: {estimator} has none; unset it")
        elif advantage.shift and advantage.estimator != "raw" and advantage.std != "none":
            problems.append(
                f"advantage.shift={advantage.shift} is in units of reward, which advantage.std="
                f"{advantage.std} divides away; set advantage.std=none"
            )
        if optimizer.min_learning_rate and optimizer.decay == "constant":
            problems.append(
                f"optimizer.min_learning_rate={optimizer.min_learning_rate}: a constant rate never "
                "comes down to it; unset it, or set optimizer.decay"
            )
        return problems

    def _best_problems(self) -> list[str]:
        metric = self.trainer.keep_best
        if isinstance(metric, bool):
            return []
        n = 1 if self.eval.temperature == 0 else self.eval.samples
        several = [f"pass@{k}" for k in range(2, n + 1) if k == n or k & (k - 1) == 0]
        scores = [f"avg@{n}", *several, *([f"maj@{n}"] if n > 1 else [])]
        places = ["eval_macro", *(f"eval/{name}" for name in self.eval.sets)]
        if self.eval.sets and metric in [
            f"{place}/{score}" for place in places for score in scores
        ]:
            return []
        return [
            f"trainer.keep_best={metric}: no score of this run's evaluations; give true, or "
            f"{' or '.join(places)} with /{', /'.join(scores)}"
        ]

    def _objective_problems(self) -> list[str]:
        problems, name = [], self.objective.name
        if name == "oapl" and self.advantage.estimator != "optimal_value":
            problems.append(
                f"objective.name=oapl regresses on R - V*, and advantage.estimator="
                f"{self.advantage.estimator} is none; set advantage.estimator=optimal_value"
            )
        if name == "asymre" and not self.advantage.shift:
            problems.append(
                "objective.name=asymre has a baseline below the mean reward, and advantage.shift "
                "is 0; set advantage.shift=-0.1 and advantage.std=none"
            )
        if name == "sao" and self.behavior == "actor":
            problems.append(
                "objective.name=sao takes its ratio to the engine's log-probs, and behavior=actor "
                "means the actor's; set behavior=engine"
            )
        if self.model.reference and "reference_logprobs" not in self.objective.choice.needs:
            problems.append(
                "model.reference is set, but the objective has no KL term: set objective.kl too"
            )
        return problems

    def _lag_problems(self) -> list[str]:
        problems, every = [], self.lag.publish_every
        if self.eval.sets and self.eval.every % every:
            problems.append(
                f"eval.every={self.eval.every}: the engine has the present weights every "
                f"lag.publish_every={every} steps; make eval.every a multiple of it"
            )
        if self.lag.in_flight is not None:
            problems += self._in_flight_problems()
        if not 1 <= self.fresh_groups < self.rollout.prompts and self.replay.fresh < 1:
            problems.append(
                f"replay.fresh={self.replay.fresh} of {self.rollout.prompts} prompts is no number "
                "of groups between none and all; choose another"
            )
        if self.replay.fresh == 1 and self.replay.capacity > 1:
            problems.append(
                f"replay.capacity={self.replay.capacity}: nothing is drawn again while "
                "replay.fresh is 1; lower replay.fresh, or unset replay.capacity"
            )
        return problems

    def _ppo_problems(self) -> list[str]:
        problems, until, overlong = [], self.reuse_until, self.shaping.overlong
        limit = self.rollout.max_response_tokens
        if overlong is not None and overlong.kind == "soft" and overlong.buffer > limit:
            problems.append(
                f"shaping.overlong.buffer={overlong.buffer} is more than "
                f"rollout.max_response_tokens={limit}; lower it"
            )
        if self.trainer.epochs == 1 and any((until.acceptance, until.kl, until.head_surge)):
            problems.append(
                "reuse_until ends the reuse of a rollout batch, but trainer.epochs=1 reuses none; "
                "raise trainer.epochs, or unset reuse_until"
            )
        if self.offline.rollouts is None:
            if self.offline.behavior != "file":
                problems.append("offline.behavior is set without offline.rollouts; set that too")
            return problems
        if self.eval.sets:
            problems.append(
                "eval.sets needs an engine, and with offline.rollouts none is started; unset it, "
                "and evaluate the model that the run exports"
            )
        if self.trainer.self_test_every is not None:
            problems.append("trainer.self_test_every tries an engine, too; unset it")
        if self.offline.behavior != "file" and self.behavior == "engine":
            problems.append(
                f"behavior=engine takes the log-probs of offline.rollouts, and offline.behavior="
                f"{self.offline.behavior} those of a model; unset one"
            )
        if self.dynamic_sampling.rounds:
            problems.append("dynamic_sampling generates, and offline.rollouts does not; unset one")
        return problems

    def _in_flight_problems(self) -> list[str]:
        problems = []
        if self.lag.keeps_cache and self.behavior == "actor":
            problems.append(
                "lag.in_flight with cache: keep: later tokens attend to keys and values of older "
                "weights, so no policy of the actor generated them; set behavior=engine, or "
                "cache: recompute"
            )
        if self.lag.publish_every > 1:
            problems.append(
                f"lag.publish_every={self.lag.publish_every} and lag.in_flight both say when the "
                "engine gets weights; unset one"
            )
        problems += [
            f"rollout.engine.{name}: lag.in_flight needs it off; remove it"
            for name in ("enable_prefix_caching", "async_scheduling")
            if self.rollout.engine.get(name)
        ]
        if self.dynamic_sampling.rounds or self.offline.rollouts is not None:
            problems.append(
                "lag.in_flight generates by itself: neither dynamic_sampling nor offline.rollouts "
                "can do so too; unset one"
            )
        if self.rollout.stop:
            problems.append(
                "rollout.stop: a text may begin before weights change and end after it, where "
                "lag.in_flight would not see it; use rollout.stop_token_ids, or unset one"
            )
        return problems

    def process_problems(self, processes: int) -> list[str]:
        """Why so many processes cannot hold the layout, whatever the model."""
        parallel, tensor, problems = self.parallel, self.rollout.tensor, []
        unit = parallel.model_size * (parallel.data or 1)
        if processes % unit or (parallel.data and processes != unit):
            problems.append(
                f"{processes} process{'es' if processes > 1 else ''} cannot hold "
                f"tensor {parallel.tensor} * pipeline "
                f"{parallel.pipeline} * context {parallel.context} * data {parallel.data or '?'}; "
                "their product must equal the number of processes: change one of parallel.*, or "
                f"start {unit} processes"
            )
        over = processes // (parallel.tensor * parallel.pipeline)
        if over % parallel.expert:
            problems.append(
                f"parallel.expert={parallel.expert} does not divide context * data = {over}, "
                "over which experts are spread; choose a divisor"
            )
        if processes % tensor:
            problems.append(
                f"rollout.tensor={tensor}: vLLM's tensor parallel size {tensor} does not divide "
                f"{processes} ranks; choose another"
            )
        return problems

    @property
    def windows(self) -> int:
        """Of `lag.in_flight`: the weights that the longest response sees."""
        every = self.lag.every_tokens
        return -(-self.rollout.max_response_tokens // every) if every else 1

    @property
    def fresh_groups(self) -> int:
        """New groups in a rollout batch, from the second one on."""
        return round(self.replay.fresh * self.rollout.prompts)

    @property
    def prompt_files(self) -> dict[str, tuple[str, ColumnsSection]]:
        """Every file of prompts with its columns, by the key that names it."""
        training = {key: (path, columns) for key, (path, columns, _) in self.training.items()}
        return training | self.evaluation_files

    @property
    def evaluation_files(self) -> dict[str, tuple[str, ColumnsSection]]:
        """Those of held-out evaluation."""
        columns = self.eval.columns or self.data.columns
        return {
            f"eval.sets.{name}": (one.path, one.columns or columns)
            for name, one in self.eval.sets.items()
        }

    @property
    def training(self) -> dict[str, tuple[str, ColumnsSection, float]]:
        """Path, columns and weight of every training set, by the key that names it."""
        if self.offline.rollouts is not None:  # rollouts bring their prompts
            return {}
        if not self.data.mix:
            return {"data.train": (self.data.train, self.data.columns, 1.0)}
        return {
            f"data.mix.{name}": (one.path, one.columns or self.data.columns, one.weight)
            for name, one in self.data.mix.items()
        }

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
